"""A few steps of every stage on real clips of every suite: the whole way from shards to a model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from worldserve.data.clips import CLIPS, load_suite_clips
from worldserve.data.dataset import clips, load_suites
from worldserve.data.suites import SUITES
from worldserve.models.protocol import RolloutInput
from worldserve.models.reference import ReferenceWorldModel
from worldserve.training.evaluate import evaluate
from worldserve.training.further import further_view
from worldserve.training.report import tables
from worldserve.training.train import FURTHER, STAGES, TrainConfig, train

SHIPPED = Path(__file__).resolve().parents[2] / CLIPS
EPISODE = 41
SUITES_HERE = tuple(dataclasses.replace(s, frames_per_episode=EPISODE) for s in SUITES.values())


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """The beginnings of two shipped clips of every suite, as shards with two views."""
    root = tmp_path_factory.mktemp("data")
    for suite in SUITES_HERE:
        for number, clip in enumerate(load_suite_clips(suite.name, SHIPPED, limit=2)):
            for split in ("train", "validation", "test"):
                directory = root / suite.name / split
                directory.mkdir(parents=True, exist_ok=True)
                views = [clip.frames[camera.name][:EPISODE] for camera in suite.cameras]
                np.savez(
                    directory / f"{clip.operation}-{number:03d}.npz",
                    frames=np.stack(views, 1)[None],
                    controls=clip.controls[None, : EPISODE - 1],
                    physics=clip.physics[None, :EPISODE],
                )
    return root


def _config(data: Path, where: Path, **changes) -> TrainConfig:
    stages = tuple(dataclasses.replace(stage, steps=2) for stage in STAGES)
    settings = {"stages": stages, "predictions": 16, "width": 48, "heads": 3, "threads": 1}
    return TrainConfig(SUITES_HERE, data, where / "run", where / "out", **(settings | changes))


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    where = tmp_path_factory.mktemp("training")
    threads = torch.get_num_threads()
    train(_config(data, where))
    torch.set_num_threads(threads)
    return where


def test_all_stages_leave_a_model_that_serves(data, trained):
    """Losses are finite; the weights load, roll out, and draw either view of every suite."""
    rows = [json.loads(line) for line in (trained / "run" / "log.jsonl").open()]
    assert [row["stage"] for row in rows] == [stage.name for stage in STAGES]
    assert all(np.isfinite(list(r.values())[1:]).all() for r in rows)
    model = ReferenceWorldModel.load(trained / "out")
    assert model.spec.views == ("front", "side")
    assert len(model.spec.operations) == sum(len(s.operations) for s in SUITES.values())
    reports = {}
    for suite in SUITES_HERE:
        result = evaluate(model, suite, data, contexts=(8,), starts=(20,), prompt=True, camera=1)
        assert result.figures[8]["contexts"] == 2
        seen = [list(clips(data, suite, "test", camera)) for camera in (0, 1)]
        further = further_view(model, zip(*seen, strict=True), context=8, starts=(20,))
        assert np.isfinite(further["psnr_carried_db"]).all()
        rows = {"8": result.figures[8]}
        reports[suite.name] = {"front": rows, "side": rows, "prompted": rows}
        reports[suite.name]["carried_over"] = further
    text = tables(reports)
    assert [line for line in text.splitlines() if line.startswith("### ")] == [
        f"### {suite.name}" for suite in SUITES_HERE
    ]
    shown = f"{result.figures[8]['gripper_cm'][-1]:.1f}"
    assert shown in text.split("### edudemo")[1]


def test_a_further_view_shares_the_rollout(data, trained):
    """What is carried over depends on the rollout, on the other camera's frame, and on the view."""
    model = ReferenceWorldModel.load(trained / "out")
    head = model.network.cross_view
    assert head is not None
    torch.nn.init.normal_(head.difference.weight, std=0.05)  # two steps have taught it little
    episodes = load_suites(data, SUITES_HERE, "test")
    here = int(np.flatnonzero(episodes.twin >= 0)[0])
    frames = episodes.frames[[here, episodes.twin[here]], 0]
    assert not np.array_equal(frames[0], frames[1])
    tokens = model.embed(frames)
    conditioning, _ = model.condition("", "front")
    outs = [
        model.rollout(
            [
                RolloutInput(
                    model.assemble([], 0), tokens[0], np.full((4, 4), c, np.float32), conditioning
                )
            ]
        )[0]
        for c in (-1.0, 1.0)
    ]
    carried = model.carry_over(outs[0], tokens[0], tokens[1], "side")
    assert carried.shape == outs[0].tokens.shape
    assert not np.allclose(carried, model.carry_over(outs[1], tokens[0], tokens[1], "side"))
    assert not np.allclose(carried, model.carry_over(outs[0], tokens[0], tokens[0], "side"))
    assert not np.allclose(carried, model.carry_over(outs[0], tokens[0], tokens[1], "front"))
    with pytest.raises(ValueError, match="top"):
        model.carry_over(outs[0], tokens[0], tokens[1], "top")


def test_a_finished_run_is_not_run_again(data, trained, tmp_path):
    """Resuming a finished run trains no step, embeds nothing again, and gives the same weights."""
    before = (trained / "out" / "weights.safetensors").read_bytes()
    lines = (trained / "run" / "log.jsonl").read_text()
    tokens = (trained / "run" / "tokens.bin").stat().st_mtime_ns
    train(dataclasses.replace(_config(data, trained), out=tmp_path))
    assert (tmp_path / "weights.safetensors").read_bytes() == before
    assert (trained / "run" / "log.jsonl").read_text() == lines
    assert (trained / "run" / "tokens.bin").stat().st_mtime_ns == tokens


def test_training_goes_on_from_weights_of_fewer_suites(data, trained, tmp_path):
    """What has the same shape is taken over, the units are kept; misfits are refused."""
    stages = tuple(dataclasses.replace(s, steps=0) for s in FURTHER)
    first = dataclasses.replace(
        _config(data, tmp_path), suites=SUITES_HERE[:1], stages=stages, predictions=8
    )
    train(first)
    further = dataclasses.replace(
        _config(data, tmp_path),
        run=tmp_path / "more",
        out=tmp_path / "all",
        stages=stages,
        start=first.out,
    )
    train(further)
    before, after = (ReferenceWorldModel.load(path) for path in (first.out, further.out))
    old, new = before.network.state_dict(), after.network.state_dict()
    assert all(torch.equal(old[name], new[name]) for name in old)
    configs = [json.loads((path / "config.json").read_text()) for path in (first.out, further.out)]
    for key in ("physics_mean", "physics_std"):
        assert configs[0]["statistics"][key] == configs[1]["statistics"][key]
    backwards = dataclasses.replace(further, suites=SUITES_HERE[::-1], run=tmp_path / "wrong")
    with pytest.raises(ValueError, match="are not the first"):
        train(backwards)
