"""Frames as they come, to frames as the model takes them: decoded where needed, resized by area."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from ctrlcache.errors import InvalidInput
from worldserve.models.protocol import Pixels

__all__ = ["decode_frames", "resize_frames"]

_FORMATS = ("JPEG", "PNG")


def resize_frames(frames: Pixels, size_px: tuple[int, int]) -> Pixels:
    """(T, H, W, 3) uint8 -> (T, h, w, 3) for size_px = (h, w), each pixel the mean of its area.

    Whole ratios are exact box averages (rounded). The aspect ratio is not kept. Always a copy.
    """
    height, width = size_px
    if frames.shape[1:3] == (height, width):
        return np.array(frames)
    made = [_resize(Image.fromarray(np.ascontiguousarray(f)), height, width) for f in frames]
    return np.stack(made)


def decode_frames(
    encoded: Sequence[bytes] | NDArray[np.object_], size_px: tuple[int, int], max_pixels: int
) -> Pixels:
    """JPEG or PNG images -> (T, h, w, 3) uint8 for size_px = (h, w).

    A JPEG that is much larger is decoded at a fraction of its size (the decoder's own area
    scaling); transparency is dropped, grey becomes RGB, orientation tags are not applied.
    InvalidInput, before anything is decoded, for an image of more than `max_pixels`, and for
    whatever cannot be decoded.
    """
    return np.stack(
        [_decode(bytes(data), index, size_px, max_pixels) for index, data in enumerate(encoded)]
    )


def _decode(data: bytes, index: int, size_px: tuple[int, int], max_pixels: int) -> Pixels:
    height, width = size_px
    name = f"FRAMES_ENCODED[{index}]"
    try:
        # Opening reads the header only.
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            pixels = image.width * image.height
            if pixels > max_pixels:
                raise InvalidInput(
                    f"{name} must have at most {max_pixels} pixels, "
                    f"got {image.width} x {image.height}"
                )
            # The image comes out at least this large: enough left to average well.
            image.draft("RGB", (2 * width, 2 * height))
            return _resize(image.convert("RGB"), height, width)
    except InvalidInput:
        raise
    except Image.DecompressionBombError:
        raise InvalidInput(f"{name} must have at most {max_pixels} pixels, got far more") from None
    except Exception as error:  # whatever a decoder makes of bytes from the network
        what = f"{len(data)} bytes" + (f" that begin with {data[:8].hex()}" if data else "")
        raise InvalidInput(
            f"{name} must be a JPEG or PNG image, got {what} ({type(error).__name__})"
        ) from None


def _resize(image: Image.Image, height: int, width: int) -> Pixels:
    if (image.height, image.width) == (height, width):
        return np.array(image)
    across, down = image.width / width, image.height / height
    if across.is_integer() and down.is_integer():
        return np.array(image.reduce((int(across), int(down))))
    return np.array(image.resize((width, height), Image.Resampling.BOX))
