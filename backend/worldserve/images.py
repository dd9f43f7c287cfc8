"""Frames as they come, to frames as the model takes them: decoded where needed, resized by area."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ctrlcache.errors import InvalidInput
from worldserve.models.protocol import Pixels

__all__ = ["decode_frames", "measure_frames", "resize_frames"]

_FORMATS = ("JPEG", "PNG")
#: Begins a scan of a JPEG; within one these bytes cannot occur. A progressive image has about ten,
#: and each goes over the whole image again: a small file of thousands would take hours.
_SCAN, _MAX_SCANS = b"\xff\xda", 64


def resize_frames(frames: Pixels, size_px: tuple[int, int]) -> Pixels:
    """(T, H, W, 3) uint8 -> (T, h, w, 3) for size_px = (h, w): each pixel the mean of its area.

    Pixels at an area's edge count by their share of it. The aspect ratio is not kept. A copy.
    """
    T, H, W, _ = frames.shape
    h, w = size_px
    if (h, w) == (H, W):
        return np.array(frames)
    if H % h == 0 and W % w == 0:
        return _boxes(frames, h, w)
    rows, columns = _shares(H, h), _shares(W, w)
    made = np.empty((T, h, w, 3), np.uint8)
    for frame, out in zip(frames, made, strict=True):
        lines = frame.reshape(H, W * 3)
        # Rows first: whole lines of memory, and little is left to do for the columns.
        squeezed = np.stack([part @ lines[first:last] for first, last, part in rows])
        squeezed = squeezed.reshape(h, W, 3).swapaxes(1, 2)  # (h, 3, W)
        for column, (first, last, part) in enumerate(columns):
            out[:, column] = np.rint(squeezed[:, :, first:last] @ part)
    return made


def _boxes(frames: Pixels, h: int, w: int) -> Pixels:
    """Areas of whole pixels, in whole numbers."""
    T, H, W, _ = frames.shape
    down, across = H // h, W // w
    area = np.uint32(down * across)
    sums = frames.reshape(T, h, down, W * 3).sum(2, dtype=np.uint32)  # (T, h, W * 3)
    sums = sums.reshape(T, h, w, across, 3).sum(3, dtype=np.uint32)  # (T, h, w, 3)
    averages: Pixels = ((2 * sums + area) // (2 * area)).astype(np.uint8)
    return averages


def _shares(size: int, parts: int) -> list[tuple[int, int, NDArray[np.float32]]]:
    """For each of `parts` equal parts of a line of `size` pixels: first and last pixel (exclusive)
    and their shares, which add up to 1."""
    made = []
    for part in range(parts):
        low, high = part * size / parts, (part + 1) * size / parts
        first, last = math.floor(low), min(math.ceil(high), size)
        pixels = np.arange(first, last)
        inside = np.minimum(pixels + 1, high) - np.maximum(pixels, low)
        made.append((first, last, (inside / inside.sum()).astype(np.float32)))
    return made


def measure_frames(encoded: Sequence[bytes] | NDArray[np.object_], max_pixels: int) -> int:
    """Pixels of all images together, by their headers: nothing is decoded.

    InvalidInput for an image of more than `max_pixels`, for another kind than JPEG and PNG, and for
    one that is built to take longer than its size tells.
    """
    total = 0
    for index, data in enumerate(encoded):
        with _opened(bytes(data), index) as image:
            if image.width * image.height > max_pixels:
                raise InvalidInput(
                    f"{_name(index)} must have at most {max_pixels} pixels, "
                    f"got {image.width} x {image.height}"
                )
            total += image.width * image.height
        scans = bytes(data).count(_SCAN) if image.format == "JPEG" else 0
        if scans > _MAX_SCANS:
            raise InvalidInput(f"{_name(index)} must have at most {_MAX_SCANS} scans, got {scans}")
    return total


def decode_frames(
    encoded: Sequence[bytes] | NDArray[np.object_], size_px: tuple[int, int]
) -> Pixels:
    """JPEG or PNG images -> (T, h, w, 3) uint8 for size_px = (h, w); `measure_frames` comes first.

    A JPEG that is much larger is decoded at a fraction of its size (the decoder's own area
    scaling); transparency is dropped, grey becomes RGB, orientation tags are not applied.
    InvalidInput for whatever cannot be decoded.
    """
    return np.stack([_decode(bytes(data), index, size_px) for index, data in enumerate(encoded)])


def _decode(data: bytes, index: int, size_px: tuple[int, int]) -> Pixels:
    height, width = size_px
    with _opened(data, index) as image:
        # The image comes out at least this large: enough left to average well.
        image.draft("RGB", (2 * width, 2 * height))
        whole: Pixels = np.array(image.convert("RGB"))
        made: Pixels = resize_frames(whole[None], size_px)[0]
        return made


@contextmanager
def _opened(data: bytes, index: int) -> Iterator[Image.Image]:
    """Opening reads the header only. What goes wrong with the image is InvalidInput."""
    try:
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            yield image
    except InvalidInput:
        raise
    except Image.DecompressionBombError:
        raise InvalidInput(f"{_name(index)} has far too many pixels") from None
    except Exception as error:  # whatever a decoder makes of bytes from the network
        what = f"{len(data)} bytes" + (f" that begin with {data[:8].hex()}" if data else "")
        raise InvalidInput(
            f"{_name(index)} must be a JPEG or PNG image, got {what} ({type(error).__name__})"
        ) from None


def _name(index: int) -> str:
    return f"FRAMES_ENCODED[{index}]"
