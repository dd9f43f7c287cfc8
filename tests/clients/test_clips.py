"""The clips that ship with the client examples, and the cutting that makes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from worldserve.data.export import SHIPPED, Cut, export_clips
from worldserve.data.suites import get_suite

CLIPS = Path(__file__).resolve().parents[2] / "client_examples" / "clips"


@pytest.mark.parametrize("cut", SHIPPED, ids=lambda cut: cut.operation)
def test_shipped_clip_needs_nothing_but_numpy(cut):
    """Frames, controls, physics and prompt come out of np.load without pickle, and fit together."""
    with np.load(CLIPS / f"{cut.operation}.npz", allow_pickle=False) as clip:
        assert clip["frames"].shape == (cut.frames, 64, 64, 3)
        assert clip["frames"].dtype == np.uint8
        assert clip["controls"].shape == (cut.frames - 1, 4)
        assert np.abs(clip["controls"]).max() <= 1
        assert clip["physics"].shape[0] == cut.frames
        assert str(clip["operation"]) == cut.operation
        prompts = {o.name: o.prompt for o in get_suite("kitchen").operations}
        assert str(clip["prompt"]) == prompts[cut.operation]


@pytest.mark.parametrize("cut", SHIPPED, ids=lambda cut: cut.operation)
def test_something_is_moved_in_every_clip(cut):
    """The object travels at least 30 cm: a clip in which only the arm moves shows little."""
    with np.load(CLIPS / f"{cut.operation}.npz") as clip:
        path = np.linalg.norm(np.diff(clip["physics"][:, 4:7], axis=0), axis=1).sum()
    assert path > 0.3


@pytest.fixture
def split(tmp_path):
    """Two test episodes of door-open whose numbers tell where they come from."""
    directory = tmp_path / "data" / "kitchen" / "test"
    directory.mkdir(parents=True)
    steps = np.arange(2 * 101, dtype=np.float32).reshape(2, 101, 1)
    np.savez(
        directory / "door-open-000.npz",
        frames=np.broadcast_to((steps % 251)[..., None, None, None], (2, 101, 1, 4, 4, 3)),
        controls=np.broadcast_to(steps[:, :100], (2, 100, 4)),
        physics=np.broadcast_to(steps, (2, 101, 9)),
    )
    return tmp_path / "data"


def test_cut_keeps_frames_controls_and_physics_together(split, tmp_path):
    """Control t leads from frame t to t + 1 in the cut as in the episode."""
    cut = Cut("door-open", episode=1, start=10, frames=20)
    [path] = export_clips(split, get_suite("kitchen"), tmp_path / "out", [cut])
    with np.load(path) as clip:
        assert clip["physics"][:, 0].tolist() == list(range(111, 131))
        assert clip["frames"][:, 0, 0, 0].tolist() == list(range(111, 131))
        assert clip["controls"][:, 0].tolist() == list(range(111, 130))


@pytest.mark.parametrize(
    ("cut", "message"),
    [
        (Cut("door-open", episode=2, start=0), "no episode 2"),
        (Cut("sweep", episode=0, start=0), "has 0"),
        (Cut("door-open", episode=0, start=60), "ends at frame 124"),
    ],
)
def test_cut_that_is_not_there_is_refused(split, tmp_path, cut, message):
    """A missing episode or a cut beyond its end is named, not papered over."""
    with pytest.raises(ValueError, match=message):
        export_clips(split, get_suite("kitchen"), tmp_path / "out", [cut])
