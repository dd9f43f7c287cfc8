"""Shards read back: rows, twins, views and operations belong together."""

from __future__ import annotations

import numpy as np
import pytest

from worldserve.data.dataset import clips, load_episodes, load_suites, operations_of
from worldserve.data.suites import SUITES

HERE = (SUITES["kitchen"], SUITES["edudemo"])


def _shard(root, suite, operation, block, episodes, views, first):
    """Frames tell their episode and their view, physics the episode."""
    directory = root / suite / "train"
    directory.mkdir(parents=True, exist_ok=True)
    number = np.arange(first, first + episodes, dtype=np.float32)
    frames = 2 * number[:, None, None, None, None, None] + np.arange(views)[:, None, None, None]
    np.savez(
        directory / f"{operation}-{block:03d}.npz",
        frames=np.broadcast_to(frames, (episodes, 3, views, 4, 4, 3)).astype(np.uint8),
        controls=np.zeros((episodes, 2, 4), np.float32),
        physics=np.broadcast_to(number[:, None, None], (episodes, 3, 9)),
    )


@pytest.fixture
def root(tmp_path):
    _shard(tmp_path, "kitchen", "drawer-open", 0, 2, 1, 0)  # from a time with one camera
    _shard(tmp_path, "kitchen", "drawer-open", 1, 2, 2, 2)
    _shard(tmp_path, "kitchen", "sweep", 0, 1, 2, 4)
    _shard(tmp_path, "edudemo", "lever", 0, 3, 2, 5)
    return tmp_path


def test_twins_are_the_same_episode_from_the_other_camera(root):
    """Each other's, of the same physics, of another view; alone where there is one view only."""
    episodes = load_suites(root, HERE, "train")
    assert len(episodes) == 2 + 2 * 2 + 2 + 2 * 3
    alone = episodes.twin < 0
    assert alone.sum() == 2
    rows = np.flatnonzero(~alone)
    twins = episodes.twin[rows]
    assert np.array_equal(episodes.twin[twins], rows)
    assert np.array_equal(episodes.physics[rows], episodes.physics[twins])
    assert (episodes.view[rows] != episodes.view[twins]).all()
    shown = 2 * episodes.physics[:, 0, 0] + episodes.view
    assert np.array_equal(episodes.frames[:, 0, 0, 0, 0], shown)


def test_operations_are_numbered_over_all_suites(root):
    """The index of a row names its operation, its suite and its prompts."""
    episodes = load_suites(root, HERE, "train")
    operations = operations_of(HERE)
    lever = episodes.physics[:, 0, 0] >= 5
    assert {operations[i].name for i in episodes.operation[lever]} == {"lever"}
    assert set(episodes.suite[lever]) == {1}
    assert set(episodes.suite[~lever]) == {0}
    prompts = episodes.prompts[episodes.operation[lever][0]]
    assert prompts[0] == "lift the load with the lever"
    assert len(prompts) == 3


def test_one_camera_has_no_twins(root):
    """The first camera sees every episode, the second those that were filmed twice."""
    first, second = (load_episodes(root, HERE[0], "train", camera) for camera in (0, 1))
    assert (len(first), len(second)) == (5, 3)
    assert (first.twin < 0).all()
    assert {clip.view for clip in clips(root, HERE[0], "train", 1)} == {"side"}


def test_missing_episodes_say_how_they_are_made(root):
    """Suite, split and command are named."""
    with pytest.raises(FileNotFoundError, match="worldserve data generate --suite inspection"):
        load_suites(root, [SUITES["inspection"]], "train")
    with pytest.raises(FileNotFoundError, match="no test episodes"):
        load_suites(root, HERE, "test")
