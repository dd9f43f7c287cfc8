"""What the camera of a clip sends: the clip's own frames, at another size, as JPEG."""

from __future__ import annotations

import dataclasses

import pytest

from worldserve.data.clips import SEED
from worldserve.data.edudemo import EduDemoSimulator
from worldserve.data.source import source_frames
from worldserve.data.suites import get_suite
from worldserve.images import decode_frames
from worldserve.training.evaluate import psnr

SUITE = dataclasses.replace(get_suite("edudemo"), clip_frames=6)


def test_what_the_camera_sends_becomes_what_the_model_knows():
    """Squeezed to the model's size, wide pictures show the very frames of the clip."""
    sent = list(source_frames(SUITE, "lever-1", (360, 640), frames=4, view="side"))
    assert len(sent) == 4
    squeezed = decode_frames(sent, (64, 64))
    [lever] = [o for o in SUITE.operations if o.name == "lever"]
    true = EduDemoSimulator(SUITE, lever).episode(SEED, 1, 6).frames[:4, 1]
    front = EduDemoSimulator(SUITE, lever).episode(SEED, 1, 6).frames[:4, 0]
    for made, frame, other in zip(squeezed, true, front, strict=True):
        assert psnr(made, frame) > 24
        assert psnr(made, other) < 20


def test_a_clip_view_or_size_that_is_not_there_is_named():
    """The error lists what there is."""
    with pytest.raises(ValueError, match=r"no clip 'lever-99'.*pendulum-0"):
        next(source_frames(SUITE, "lever-99", (8, 8)))
    with pytest.raises(ValueError, match=r"from 'top'.*front, side"):
        next(source_frames(SUITE, "lever-1", (8, 8), view="top"))
    with pytest.raises(ValueError, match="give size_px"):
        next(source_frames(SUITE, "lever-1"))
