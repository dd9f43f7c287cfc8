"""The simulator's outcome of a question: the recorded one where the recorded controls are asked."""

from __future__ import annotations

import numpy as np
import pytest

from worldserve.bench.truth import Truths, questions
from worldserve.bench.workload import Action, Clip
from worldserve.data.clips import SEED
from worldserve.data.episode import open_simulator
from worldserve.data.suites import get_suite

pytest.importorskip("pymunk", reason="the simulator of suite edudemo")
HELD = (0.4, -0.2, 0.5, 1.0)


@pytest.fixture(scope="module")
def recorded():
    """An experiment of 60 frames, and its simulator."""
    suite = get_suite("edudemo")
    simulator = open_simulator(suite, suite.operations[0])
    episode = simulator.episode(SEED, 0, 60)
    name = suite.operations[0].name
    clip = Clip(
        name=f"{name}-0",
        suite="edudemo",
        operation=name,
        prompt="",
        frames=episode.frames[:, 0],
        controls=episode.controls,
        physics=episode.physics,
        number=0,
    )
    return clip, simulator


def test_a_branch_that_repeats_the_record_ends_where_it_did(recorded):
    clip, simulator = recorded
    asked = [(f, clip.controls[f : f + 8]) for f in (20, 3)]
    for (frame, _), physics in zip(
        asked, simulator.outcomes(SEED, 0, clip.controls, asked), strict=True
    ):
        assert np.array_equal(physics, clip.physics[frame + 1 : frame + 9])


def test_questions_know_where_they_were_asked(recorded):
    """After an advance, the committed controls come first; after a seek, the older frame counts."""
    clip, _ = recorded
    actions = [
        Action("open", "probe", HELD, 0, (0, 24)),
        Action("advance", "advance", HELD, 0, steps=3),
        Action("drag", "probe", (0.1, 0.1, 0.1, 0.1), 0),
        Action("scrub", "seek", HELD, 0, seek=10),
    ]
    found = questions(clip, actions)
    assert [(frame, len(plan)) for frame, plan in found] == [(23, 8), (23, 8), (23, 11), (10, 8)]
    assert found[2][1][:3] == pytest.approx(np.tile(HELD, (3, 1)))


def test_truths_are_kept_and_shipped(recorded, tmp_path):
    """What was simulated once is read back; what ships needs no simulator."""
    clip, simulator = recorded
    actions = [Action("open", "probe", HELD, 0, (0, 24))]
    [there] = simulator.outcomes(SEED, 0, clip.controls, questions(clip, actions))
    truths = Truths(tmp_path / "made", tmp_path)
    assert np.array_equal(truths.of(clip, actions), there[-1:])
    truths.ship("edudemo", [(clip, actions)])
    reader = Truths(tmp_path / "elsewhere", tmp_path)
    reader._simulators[clip.suite, clip.operation] = None  # as where it is not installed
    assert np.array_equal(reader.of(clip, actions), there[-1:])
    assert reader.of(clip, [*actions, *actions]) is None
    # A shorter session of the same user has the beginning of what is shipped.
    truths.ship("edudemo", [(clip, [*actions, *actions])])
    reader = Truths(tmp_path / "elsewhere", tmp_path)
    reader._simulators[clip.suite, clip.operation] = None
    assert np.array_equal(reader.of(clip, actions, [*actions, *actions]), there[-1:])
