"""The experiments: reproducible, bounded, and moved by what the controls say."""

from __future__ import annotations

import numpy as np
import pytest

from worldserve.data.edudemo import EduDemoSimulator, _Stage, place
from worldserve.data.edudemo_scenes import SCENES
from worldserve.data.suites import get_suite

SUITE = get_suite("edudemo")
OPERATIONS = {operation.name: operation for operation in SUITE.operations}


@pytest.mark.parametrize("name", OPERATIONS)
def test_same_seed_and_index_give_the_same_episode(name):
    """Frames, controls and truth alike; another index gives another episode."""
    first = EduDemoSimulator(SUITE, OPERATIONS[name]).episode(5, 1, 12)
    again = EduDemoSimulator(SUITE, OPERATIONS[name]).episode(5, 1, 12)
    other = EduDemoSimulator(SUITE, OPERATIONS[name]).episode(5, 2, 12)
    assert np.array_equal(first.frames, again.frames)
    assert np.array_equal(first.controls, again.controls)
    assert np.array_equal(first.physics, again.physics)
    assert not np.array_equal(first.physics, other.physics)


@pytest.mark.parametrize("name", OPERATIONS)
def test_everything_stays_on_the_stage(name):
    """Hand and object stay where the camera sees them, and no number is ever lost."""
    episode = EduDemoSimulator(SUITE, OPERATIONS[name]).episode(9, 0, 101)
    assert episode.frames.shape == (101, 2, 64, 64, 3)
    assert np.isfinite(episode.physics).all()
    assert np.abs(episode.controls).max() <= 1
    for x, z in ((0, 2), (4, 6)):
        assert np.abs(episode.physics[:, x]).max() < 0.27
        assert 0 < episode.physics[:, z].min() < episode.physics[:, z].max() < 0.52


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_experimenter_takes_hold_and_moves_something(name):
    """Within three episodes: the object moves, is held, and the experiment succeeds."""
    simulator = EduDemoSimulator(SUITE, OPERATIONS[name], size_px=(8, 8))
    episodes = [simulator.episode(30_000, index, 101) for index in range(3)]
    physics = np.concatenate([e.physics for e in episodes])
    moved = [np.ptp(e.physics[:, 4:7], axis=0).max() for e in episodes]
    assert max(moved) > 0.03
    assert 0 < physics[:, 7].mean() < 0.9
    assert 0 < physics[:, 8].mean() < 1


def _advance(name: str, control: tuple[float, ...], frames: int) -> _Stage:
    stage = _Stage(SCENES[name], np.random.default_rng(4))
    for _ in range(frames):
        stage.advance(np.array(control, np.float32))
    return stage


def test_the_control_says_where():
    """A hand that nothing holds back ends where its control points to."""
    for where in ((-0.8, 0.5), (0.7, 0.9)):
        stage = _advance("pendulum", (*where, 1.0, -1.0), 25)
        assert np.allclose(stage.hand, place(np.array(where)), atol=0.3)


def test_the_control_says_how_hard():
    """Against a stiff spring, a hard pull stretches further than a soft one."""
    pulled = []
    for hard in (-1.0, 1.0):
        stage = _Stage(SCENES["spring"], np.random.default_rng(4))
        rest = stage.scene.main.position.y
        for t in range(40):
            x, z = stage.scene.main.position
            aim = (x, z) if t < 20 else (x, 6.0)
            how = -1.0 if t < 16 else 1.0
            wanted = (aim[0] / 23, (aim[1] - 5) / 21 - 1, 1.0 if t < 20 else hard, how)
            stage.advance(np.clip(wanted, -1, 1).astype(np.float32))
        assert stage.holds
        pulled.append(rest - stage.scene.main.position.y)
    assert pulled[1] > pulled[0] + 2


def test_the_control_says_how():
    """A closed hand holds what is under it, an open one lets it go."""
    stage = _Stage(SCENES["bounce"], np.random.default_rng(4))
    for how in (-1.0,) * 25 + (1.0,) * 3:
        x, z = stage.scene.main.position
        stage.advance(np.array([x / 23, (z - 5) / 21 - 1, 0.5, how], np.float32).clip(-1, 1))
    assert stage.holds
    x, z = stage.hand
    stage.advance(np.array([x / 23, (z - 5) / 21 - 1, 0.5, -1.0], np.float32).clip(-1, 1))
    assert not stage.holds


def test_a_pulled_and_released_sling_shoots():
    """The ball leaves the fork to the other side once it is let go."""
    stage = _Stage(SCENES["projectile"], np.random.default_rng(4))
    start = stage.scene.main.position
    for t in range(60):
        x, z = stage.scene.main.position if t < 24 else (start.x - 9, start.y - 4)
        how = 1.0 if 20 <= t < 36 else -1.0
        control = np.array([x / 23, (z - 5) / 21 - 1, 1.0, how], np.float32)
        stage.advance(control.clip(-1, 1))
    assert stage.scene.main.position.x > start.x + 6
    assert len(stage.scene.lines) == 0


def test_the_rope_of_the_pulley_keeps_its_length():
    """What one weight sinks, the other rises, whoever pulls."""
    stage = _Stage(SCENES["pulley"], np.random.default_rng(4))
    light, heavy = stage.scene.handles
    total = light.position.y + heavy.position.y
    rng = np.random.default_rng(0)
    for _ in range(60):
        stage.advance(rng.uniform(-1, 1, 4).astype(np.float32))
        assert abs(light.position.y + heavy.position.y - total) < 1.5


def test_two_views_show_the_same_moment_differently():
    """Both cameras see every frame; their pictures are not each other's."""
    episode = EduDemoSimulator(SUITE, OPERATIONS["lever"]).episode(3, 0, 4)
    front, side = episode.frames[:, 0], episode.frames[:, 1]
    assert np.abs(front.astype(int) - side).mean() > 5
