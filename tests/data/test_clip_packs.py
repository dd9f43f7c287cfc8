"""Packs of test clips: what is recorded comes back, and what is no pack is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import random
from pathlib import Path

import numpy as np
import pytest

from ctrlcache.errors import InvalidInput
from worldserve.data import clips
from worldserve.data.edudemo import EduDemoSimulator
from worldserve.data.suites import SUITES, get_suite
from worldserve.training.evaluate import psnr

SHIPPED = Path(__file__).resolve().parents[2] / clips.CLIPS
SMALL = dataclasses.replace(get_suite("edudemo"), clips=3, clip_frames=9)


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    return clips.pack_suite_clips(SMALL, tmp_path_factory.mktemp("packs")).parent


def test_a_pack_gives_back_what_was_recorded(packed):
    """Controls and physics bit for bit, frames of both views at least as good as 36 dB."""
    loaded = clips.load_suite_clips("edudemo", packed)
    assert [clip.operation for clip in loaded] == [o.name for o in SMALL.operations[:3]]
    for clip, operation in zip(loaded, SMALL.operations, strict=False):
        true = EduDemoSimulator(SMALL, operation).episode(40_000, 0, 9)
        assert np.array_equal(clip.controls, true.controls)
        assert np.array_equal(clip.physics, true.physics)
        assert clip.prompt == operation.prompt
        for view, name in enumerate(("front", "side")):
            for made, recorded in zip(clip.frames[name], true.frames[:, view], strict=True):
                assert psnr(made, recorded) > 36


def test_frames_survive_both_codecs():
    """H.264 comes close, the lossless codec gives the bits; an unknown one is refused."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 256, (5, 8, 8, 3), dtype=np.uint8).repeat(8, 1).repeat(8, 2)
    video = clips._to_h264(noise, 10.0, 19)
    assert all(
        psnr(a, b) > 30
        for a, b in zip(clips._decode("h264", video, noise.shape), noise, strict=True)
    )
    still = np.broadcast_to(noise[:1], (64, 64, 64, 3))
    codec, data = clips._encode(np.ascontiguousarray(still), 10.0, 1)
    assert np.array_equal(clips._decode(codec, data, still.shape), still) or codec == "h264"
    with pytest.raises(ValueError, match="codec 'gif'"):
        clips._decode("gif", data, still.shape)


def test_only_what_is_asked_for_is_decoded(packed):
    """One clip, one view; an unknown view is named."""
    [clip] = clips.load_suite_clips("edudemo", packed, limit=1, views=["side"])
    assert list(clip.frames) == ["side"]
    assert clip.seen("side").frames is clip.frames["side"]
    with pytest.raises(InvalidInput, match="top"):
        clips.load_suite_clips("edudemo", packed, views=["top"])


def test_what_is_no_pack_is_refused(packed, tmp_path):
    """A missing file says how to make it; a cut one and one of another suite are named."""
    with pytest.raises(FileNotFoundError, match="worldserve data clips --suite edudemo"):
        clips.load_suite_clips("edudemo", tmp_path)
    whole = (packed / "edudemo.npz").read_bytes()
    (tmp_path / "edudemo.npz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "kitchen.npz").write_bytes(whole)
    for suite in ("edudemo", "kitchen"):
        with pytest.raises(InvalidInput, match=f"{suite}.npz is no pack"):
            clips.load_suite_clips(suite, tmp_path)


@pytest.mark.parametrize("suite", SUITES.values(), ids=lambda suite: suite.name)
def test_shipped_packs_hold_what_the_suite_promises(suite):
    """All clips, about 22 s each, controls in range, somebody moving something in each suite.
    Decoding takes most of a minute: of the frames, a seeded sample is looked at, or all of them
    with CTRLCACHE_ALL_CLIPS=1."""
    loaded = clips.load_suite_clips(suite.name, SHIPPED, views=[])
    assert len(loaded) == suite.clips
    for clip in loaded:
        assert clip.controls.shape == (suite.clip_frames - 1, 4)
        assert np.abs(clip.controls).max() <= 1
        assert clip.physics.shape == (suite.clip_frames, 9)
    moved = [np.ptp(clip.physics[:, 4:7], axis=0).max() for clip in loaded]
    assert np.mean(np.array(moved) > 0.02) > 0.5
    with np.load(SHIPPED / f"{suite.name}.npz") as pack:
        index = json.loads(str(pack["index"]))
        shape = (suite.clip_frames, 64, 64, 3)
        assert tuple(index["shape"]) == shape
        numbers = range(suite.clips)
        if not os.environ.get("CTRLCACHE_ALL_CLIPS"):
            numbers = random.Random(suite.name).sample(numbers, 4)
        for number in numbers:
            codec = index["clips"][number]["codecs"][0]
            frames = clips._decode(codec, pack[f"frames_{number}_0"].tobytes(), shape)
            assert np.ptp(frames, axis=(1, 2, 3)).min() > 60, "no frame is empty"
