"""What is learned from the frozen model: the adapter and the calibration of trust.

An analytic model with a known, smooth, nonlinear response stands in for a trained one, so that
statistics can be checked against the truth.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from numpy.typing import NDArray
from typer.testing import CliRunner

from ctrlcache.conformal import coverage
from ctrlcache.errors import CalibrationError
from ctrlcache.scores import relative_error
from ctrlcache.transfer import Adapter, Jacobian, Migration, Reuse
from worldserve.calibrate import (
    calibrate_model,
    collect,
    interleave,
    load_model,
    model_command,
    psnr_db,
)
from worldserve.models.protocol import (
    Absorbed,
    Checkpoint,
    Float,
    ModelSpec,
    Pixels,
    RolloutInput,
    RolloutOutput,
    WorldModel,
)
from worldserve.neighbourhood import Sampling, neighbourhood, presents
from worldserve.training.adapter import AdapterConfig, PairSet, generate_pairs, train_adapter
from worldserve.training.adapter import command as train_command

AXES, DIMS, PX = 3, 24, 8


class Analytic:
    """s_h = s_0(memory) + W tanh(V (s_0, (h / 8) c)): smooth, scene-dependent, nonlinear in c."""

    def __init__(self) -> None:
        rng = np.random.default_rng(42)
        self._look = rng.normal(size=(PX * PX * 3, DIMS)).astype(np.float32) / 14
        self._inner = rng.normal(size=(DIMS + AXES, 16)).astype(np.float32)
        self._inner[:DIMS] /= 5
        self._outer = rng.normal(size=(16, DIMS)).astype(np.float32) / 3
        self.spec = ModelSpec(
            name="analytic",
            version="1",
            weights_digest="analytic-1",
            dtype="float32",
            control_dim=AXES,
            state_dim=DIMS,
            frame_px=(PX, PX),
            window=4,
            receptive_field=4,
            max_horizon=16,
            physics_names=("x_m",),
            physical=(0, 4),
            semantic=(4, 8),
            state_scale=rng.uniform(0.5, 2, DIMS).astype(np.float32),
        )

    def condition(self, prompt: str, view: str) -> tuple[Any, bytes]:
        return None, prompt.encode()

    def embed(self, frames: Pixels) -> Float:
        flat = frames.reshape(len(frames), -1).astype(np.float32) / 255 - 0.5
        return (flat @ self._look)[:, None, :]  # (T, 1, DIMS)

    def assemble(self, slices: Sequence[Float], position: int) -> Any:
        return np.mean(slices, axis=0) if slices else np.zeros(DIMS, np.float32)

    def absorb(self, memory: Any, tokens: Float, controls: Float, conditioning: Any) -> Absorbed:
        assert len(tokens) == len(controls)
        for t in tokens:
            memory = 0.7 * memory + 0.3 * t[0]
        return Absorbed(memory, tuple(t[0] for t in tokens), tokens[-1])

    def rollout(
        self, inputs: Sequence[RolloutInput], checkpoint: Checkpoint | None = None
    ) -> list[RolloutOutput]:
        made = []
        for x in inputs:
            start = x.memory + x.tokens[0]
            acted = np.arange(1, len(x.controls) + 1, dtype=np.float32)[:, None] / 8
            seen = np.concatenate(
                [np.repeat(start[None], len(acted), 0), x.controls * acted], axis=1
            )
            states = (start + np.tanh(seen @ self._inner) @ self._outer).astype(np.float32)
            made.append(RolloutOutput(states[:, None], states, x.tokens))
        return made

    def generate(
        self,
        last_frames: Sequence[Pixels],
        tokens: Sequence[Float],
        seeds: Sequence[int],
        checkpoint: Checkpoint | None = None,
    ) -> list[Pixels]:
        made = []
        for t in tokens:
            image = 128 + 40 * np.resize(t[:, 0], (len(t), PX, PX, 3))
            made.append(np.clip(image, 0, 255).astype(np.uint8))
        return made

    def physics(self, states: Float) -> Float:
        return states[..., :1]

    def confidence(self, states: Float) -> float:
        return 1.0

    def operation(self, states: Float) -> str:
        return ""


@dataclasses.dataclass(frozen=True)
class Clip:
    frames: NDArray[np.uint8]
    controls: NDArray[np.float32]
    prompt: str = "do"
    view: str = ""
    operation: str = "op"


def make_clips(count: int, seed: int, length: int = 30) -> list[Clip]:
    rng = np.random.default_rng(seed)
    return [
        Clip(
            rng.integers(0, 256, (length, PX, PX, 3), dtype=np.uint8),
            rng.uniform(-1, 1, (length - 1, AXES)).astype(np.float32),
        )
        for _ in range(count)
    ]


MODEL: WorldModel = Analytic()
SAMPLING = Sampling(probe_radii=(0.05,))


# --- sampling -------------------------------------------------------------------------------------


def test_presents_carry_what_a_session_would() -> None:
    """Walking through a clip gives the memory of absorbing everything before each point at once."""
    clip = make_clips(1, 0)[0]
    points = list(presents(MODEL, [clip], 5, np.random.default_rng(0), 8))
    assert len(points) == 5
    for point in points:
        at = next(t for t in range(30) if (clip.frames[t] == point.frame).all())
        tokens = MODEL.embed(clip.frames[: at + 1])
        memory = MODEL.assemble([], 0)
        if at:
            memory = MODEL.absorb(memory, tokens[:-1], clip.controls[:at], None).memory
        np.testing.assert_allclose(point.memory, memory, rtol=1e-5, atol=1e-6)
        assert (point.control == clip.controls[at]).all()


def test_neighbours_lie_where_they_were_asked_to() -> None:
    """Distances stay between the bounds and all controls in [-1, 1]."""
    rng = np.random.default_rng(0)
    how = Sampling(queries=200, nearest=0.01, farthest=0.4)
    for point in presents(MODEL, make_clips(3, 0), 4, rng, 8):
        around = neighbourhood(MODEL, point, rng, how)
        assert around.distances.min() > 0.0099
        assert around.distances.max() < 0.4001
        assert np.abs(around.query_controls).max() <= 1
        single = (around.query_controls != around.control).sum(axis=1) == 1
        assert 0.05 < single.mean() < 0.6


def test_distances_can_be_given() -> None:
    """A table over control distances asks at exactly these."""
    rng = np.random.default_rng(0)
    how = Sampling(distances=(0.01, 0.1, 0.4))
    for point in presents(MODEL, make_clips(2, 0), 4, rng, 8):
        around = neighbourhood(MODEL, point, rng, how)
        assert around.distances.tolist() == pytest.approx(how.distances, rel=1e-4)


def test_probes_give_the_models_own_derivative() -> None:
    """The scored Jacobian is that of the analytic model."""
    rng = np.random.default_rng(0)
    point = next(iter(presents(MODEL, make_clips(1, 0), 4, rng, 8)))
    around = neighbourhood(MODEL, point, rng, Sampling(probe_radii=(0.02,)))
    scores = around.scores(0.02, MODEL.spec.state_scale)
    step = 1e-2
    for axis in range(AXES):
        plan = np.repeat(around.control[None], 8, axis=0)
        up, down = plan.copy(), plan.copy()
        up[:, axis] += step
        down[:, axis] -= step
        a, b = MODEL.rollout(
            [RolloutInput(point.memory, point.tokens, p, None) for p in (up, down)]
        )
        slope = (a.states - b.states) / (2 * step)
        np.testing.assert_allclose(scores.jacobian[..., axis], slope, atol=0.02)


# --- calibration ----------------------------------------------------------------------------------


def test_calibrated_trust_holds_for_the_model() -> None:
    """Generated, calibrated, and measured on other clips: the bound holds and is worth having."""
    trust, reach = calibrate_model(
        MODEL, make_clips(80, 1), contexts=600, sampling=Sampling(probe_radii=(0.02, 0.1))
    )
    assert trust.weights_digest == "analytic-1"
    assert trust.probe_radius == max(reach, key=lambda r: reach[r])
    assert reach[trust.probe_radius] > 0.03
    fresh = collect(
        MODEL, make_clips(80, 2), 600, Sampling(probe_radii=(trust.probe_radius,)), frames_every=0
    )
    rows = coverage(trust, fresh[trust.probe_radius])
    judged = [r for r in rows if r.contexts >= 100]
    assert len(judged) > 10
    assert all(r.share <= 1.3 * trust.delta for r in judged)
    assert 0 < trust.frame_distance < 0.5


def test_coverage_table_is_of_the_other_clips() -> None:
    """Given clips to measure on, the table counts their scenes, as many as asked for."""
    ticks: list[None] = []
    trust, _ = calibrate_model(
        MODEL,
        make_clips(40, 1),
        make_clips(10, 2),
        contexts=250,
        sampling=SAMPLING,
        frames_every=0,
        advance=lambda: ticks.append(None),
    )
    assert trust.contexts == 250
    assert max(r.contexts for r in trust.coverage) == 80
    assert len(ticks) == 250 + 80
    assert trust.frame_distance == 0


def test_calibration_needs_clips() -> None:
    """Without clips there is no calibration, and the error says so."""
    with pytest.raises(CalibrationError, match="no clips"):
        collect(MODEL, [], 10, SAMPLING)


def test_psnr_agrees_with_its_definition() -> None:
    """A difference of 16 in every pixel is 24.05 dB; no difference is capped."""
    a = np.full((2, 4, 4, 3), 100, np.uint8)
    b = a.copy()
    b[1] += 16
    assert psnr_db(a, b).tolist() == pytest.approx([99.0, 24.048], abs=1e-3)


def test_suites_take_turns() -> None:
    """Clips of several suites are interleaved, the longer one fills up."""
    a, b = make_clips(1, 0), make_clips(3, 1)
    assert list(interleave([a, b])) == [a[0], b[0], b[1], b[2]]


def make_analytic(weights: Path) -> WorldModel:
    return Analytic()


def test_models_are_loaded_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A user's own loader is found by module and name; what fails is said."""
    monkeypatch.setitem(sys.modules, "their_model", types.SimpleNamespace(load=make_analytic))
    assert load_model("their_model:load", tmp_path).spec.name == "analytic"
    for bad in ("their_model", "their_model:absent", "no.such.module:load"):
        with pytest.raises(CalibrationError):
            load_model(bad, tmp_path)


def as_program(command: Callable[..., None], *arguments: str) -> Any:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize("command", [model_command, train_command])
def test_commands_explain_what_is_missing(
    command: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """No weights, no such suite, no data: one line each, and status 1."""
    monkeypatch.setitem(sys.modules, "their_model", types.SimpleNamespace(load=make_analytic))
    weights = ("--weights", str(tmp_path / "absent"))
    known = ("--loader", "their_model:load", "--data", str(tmp_path))
    for arguments, text in (
        (weights, "cannot load a model"),
        ((*known, "--suite", "bathroom"), "unknown suite 'bathroom'"),
        (known, "worldserve data generate"),
    ):
        done = as_program(command, *arguments)
        assert done.exit_code == 1
        assert text in done.output


# --- the adapter ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pairs() -> PairSet:
    return generate_pairs(MODEL, make_clips(25, 3), 200)


@pytest.fixture(scope="module")
def adapter(pairs: PairSet) -> Adapter:
    return train_adapter(pairs, MODEL.spec, AdapterConfig(hidden=12, steps=500))


def test_every_ordered_pair_of_every_step_is_counted(pairs: PairSet) -> None:
    """Nine controls and eight steps give 576 pairs of a context."""
    assert pairs.states.shape == (200, 9, 8, DIMS)
    assert pairs.pairs == 200 * 576


def test_adapter_beats_plain_reuse_on_other_clips(adapter: Adapter) -> None:
    """On unseen scenes the migrated states are much closer than the cached ones."""
    fresh = generate_pairs(MODEL, make_clips(10, 4), 60)
    source, target = fresh.states[:, 0], fresh.states[:, 5]
    control, query = fresh.controls[:, 0], fresh.controls[:, 5]

    def error(migration: Migration) -> float:
        moved = migration.migrate(source, None, control, query)
        return float(np.median(relative_error(moved, target, MODEL.spec.state_scale)))

    assert error(adapter) < 0.6 * error(Reuse())


def test_training_is_reproducible(pairs: PairSet) -> None:
    """The same seed gives the same adapter; another one does not."""
    how = AdapterConfig(hidden=4, steps=5)
    first, again = (train_adapter(pairs, MODEL.spec, how) for _ in range(2))
    other = train_adapter(pairs, MODEL.spec, dataclasses.replace(how, seed=1))
    assert (first.outer == again.outer).all()
    assert (first.outer != other.outer).any()


def test_default_adapter_of_the_reference_sizes_is_small() -> None:
    """256 state dimensions, four axes, nine hidden units: fewer than 5,000 parameters."""
    rng = np.random.default_rng(0)
    spec = dataclasses.replace(
        MODEL.spec, state_dim=256, control_dim=4, state_scale=np.ones(256, np.float32)
    )
    few = PairSet(
        rng.normal(size=(2, 3, 2, 256)).astype(np.float32),
        rng.normal(size=(2, 3, 4)).astype(np.float32),
    )
    made = train_adapter(few, spec, AdapterConfig(steps=1))
    assert made.parameters < 5_000
    big = train_adapter(few, spec, AdapterConfig(hidden=128, steps=1))
    assert big.parameters == 128 * (256 + 8 + 256)


def test_saved_adapter_belongs_to_the_weights(adapter: Adapter, tmp_path: Path) -> None:
    """What was trained is bound to the digest of the model it was trained for."""
    adapter.save(tmp_path / "a.safetensors")
    Adapter.load(tmp_path / "a.safetensors", "analytic-1")
    with pytest.raises(CalibrationError):
        Adapter.load(tmp_path / "a.safetensors", "analytic-2")


def test_first_order_beats_the_adapter_near_by(adapter: Adapter) -> None:
    """With a couplet's own Jacobian, nearby answers are better than any general adapter's."""
    found = collect(MODEL, make_clips(10, 5), 60, Sampling(farthest=0.05), migration=Jacobian())
    moved = collect(MODEL, make_clips(10, 5), 60, Sampling(farthest=0.05), migration=adapter)
    assert np.median(found[0.05].error) < np.median(moved[0.05].error)
