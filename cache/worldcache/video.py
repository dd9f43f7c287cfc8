"""Frames of any video file that PyAV reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctrlcache.errors import InvalidInput

__all__ = ["Video", "read_video"]


@dataclass(frozen=True, eq=False)
class Video:
    """frames (T, h, w, 3), every `every`-th of the file's, at most `side` pixels wide or high.

    size: width and height in the file. trouble: why reading ended early, "" where it did not.
    """

    frames: NDArray[np.uint8]
    size: tuple[int, int]
    codec: str
    fps: float
    every: int
    trouble: str = ""


def read_video(path: Path, most_frames: int = 512, side: int = 640) -> Video:
    """Up to `most_frames` frames, evenly spread where the file says how many it has.

    InvalidInput where the file is absent, empty, no video, or cut off before its first frame. One
    that is cut off later gives what it has, and says so in `trouble`.
    """
    av = _av()
    if not path.is_file():
        raise InvalidInput(f"{path} is not there" if not path.exists() else f"{path} is no file")
    if not path.stat().st_size:
        raise InvalidInput(f"{path} is empty")
    try:
        container = av.open(str(path))
    except (av.FFmpegError, ValueError) as error:
        raise InvalidInput(f"{path} is no video that can be read, or is cut off: {error}") from None
    with container:
        if not container.streams.video:
            raise InvalidInput(f"{path} has no video stream")
        stream = container.streams.video[0]
        every = max(1, -(-stream.frames // most_frames))
        frames, trouble = _decode(av, container, stream, every, most_frames, side)
        if not frames:
            why = trouble or "there is no frame in it"
            raise InvalidInput(f"{path} cannot be read: {why}")
        thinned = len(frames) == most_frames
        if not trouble and not thinned:
            trouble = _missing(container, stream, len(frames) * every)
        rate = stream.average_rate
        return Video(
            frames=np.stack(frames),
            size=(stream.codec_context.width, stream.codec_context.height),
            codec=stream.codec_context.name,
            fps=float(rate) if rate else 0.0,
            every=every,
            trouble=trouble,
        )


def _decode(
    av: Any, container: Any, stream: Any, every: int, most: int, side: int
) -> tuple[list[NDArray[np.uint8]], str]:
    """Frames, and what ended them before the file did."""
    frames: list[NDArray[np.uint8]] = []
    try:
        for index, frame in enumerate(container.decode(stream)):
            if index % every:
                continue
            if len(frames) == most:
                break
            width, height = _fitted(frame.width, frame.height, side)
            image = frame.reformat(width=width, height=height, format="rgb24").to_ndarray()
            if frames and image.shape != frames[0].shape:
                return frames, f"the picture changes its size at frame {index}"
            frames.append(image)
    except (av.FFmpegError, ValueError) as error:
        return frames, str(error)
    return frames, ""


def _missing(container: Any, stream: Any, frames: int) -> str:
    """What the file says it has and has not, as far as it says."""
    if stream.frames > frames:
        return f"of {stream.frames} frames, {frames} are there"
    rate, seconds = stream.average_rate, (container.duration or 0) / 1e6
    if rate and frames / float(rate) < 0.9 * seconds - 1:
        return f"of {seconds:.1f} s, {frames / float(rate):.1f} s are there"
    return ""


def _fitted(width: int, height: int, side: int) -> tuple[int, int]:
    scale = min(1.0, side / max(width, height))
    return max(1, round(width * scale)), max(1, round(height * scale))


def _av() -> Any:
    try:
        import av
    except ImportError:
        raise InvalidInput("reading videos needs PyAV: pip install 'ctrlcache[analyze]'") from None
    av.logging.set_level(None)
    return av
