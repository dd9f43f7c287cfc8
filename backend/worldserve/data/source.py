"""What the camera of a test clip sends, at its own size: JPEG images, made on demand.

An inspection camera sends 3840 x 2160; the model sees 64 x 64. The pictures are rendered anew from
the clip's seed, one by one (221 frames of that size would fill 5 GB), through an anamorphic lens:
they show the square that the model knows, stretched, and the server's squeeze undoes it.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from worldserve.data.clips import SEED, clip_plan
from worldserve.data.episode import open_simulator
from worldserve.data.suites import Suite

__all__ = ["source_frames"]


def source_frames(
    suite: Suite,
    clip: str,
    size_px: tuple[int, int] | None = None,
    frames: int | None = None,
    view: str = "front",
    quality: int = 90,
) -> Iterator[bytes]:
    """JPEG images of the first `frames` frames of a clip, as `FRAMES_ENCODED` takes them.

    size_px: (height, width), the suite's `source_px` where None. ValueError where the suite has no
    such clip or view, or no size of its own.
    """
    size = size_px or suite.source_px
    if size is None:
        raise ValueError(f"suite {suite.name!r} has no source_px of its own: give size_px")
    known = {name: (operation, index) for name, operation, index in clip_plan(suite)}
    cameras = tuple(camera for camera in suite.cameras if camera.name == view)
    if clip not in known or not cameras:
        raise ValueError(
            f"suite {suite.name!r} has no clip {clip!r} seen from {view!r}; its clips: "
            f"{', '.join(known)}; its views: {', '.join(c.name for c in suite.cameras)}"
        )
    operation, index = known[clip]
    simulator = open_simulator(dataclasses.replace(suite, cameras=cameras), operation, size)
    try:
        for number, moment in enumerate(simulator.moments(SEED, index, suite.clip_frames)):
            if number == frames:
                break
            yield _jpeg(moment.frames[0], quality)
    finally:
        simulator.close()


def _jpeg(image: NDArray[np.uint8], quality: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "JPEG", quality=quality)
    return buffer.getvalue()
