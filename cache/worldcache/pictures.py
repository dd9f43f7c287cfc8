"""Pictures as residuals that compress: block by block, against the left neighbour or a base.

A block of 4 x 4 pixels is written as the difference to the pixel on the left where the picture has
changed from its base, and as the difference to the base where it has not; one bit says which. Red
and blue are written against green. All of it is undone exactly.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["from_blocks", "is_picture", "nearly", "to_blocks"]

Pixels = NDArray[np.uint8]
_SIDE = 4


def is_picture(array: NDArray[Any]) -> bool:
    """Whether these are RGB pixels: (..., h, w, 3) of uint8."""
    return array.dtype == np.uint8 and array.ndim >= 3 and array.shape[-1] == 3 and array.size > 0


def to_blocks(picture: Pixels, base: Pixels | None) -> Pixels:
    """picture and base (..., h, w, 3) -> bytes: the bits of the blocks, then (3, rows, w)."""
    rows = _rows(picture)
    left = _residual(rows, _shifted(rows))
    if base is None:
        return left.reshape(-1)
    change = _residual(rows, _rows(base))
    spatial = _spread(_cost(left) < _cost(change), rows.shape)
    body = np.where(spatial, left, change)
    bits = np.packbits(spatial[::_SIDE, ::_SIDE])
    return np.concatenate((bits, body.reshape(-1)))


def from_blocks(body: Pixels, shape: tuple[int, ...], base: Pixels | None) -> Pixels:
    """The picture of `shape` that `to_blocks` was given; ValueError where that cannot be."""
    width = shape[-2]
    height = int(np.prod(shape[:-2]))
    bits = 0 if base is None else -(-(-(-height // _SIDE) * -(-width // _SIDE)) // 8)
    planes = body[bits:].reshape(3, height, width).copy()
    planes[0] += planes[1]
    planes[2] += planes[1]
    if base is None:
        np.add.accumulate(planes, axis=2, out=planes, dtype=np.uint8)
        return _joined(planes, shape)
    blocks = -(-height // _SIDE), -(-width // _SIDE)
    flags = np.unpackbits(body[:bits], count=blocks[0] * blocks[1]).astype(bool).reshape(blocks)
    spatial = _spread(flags, (height, width, 3))
    before = np.moveaxis(_rows(base), -1, 0)
    out = np.where(spatial, planes, planes + before)
    # What is written against its left neighbour has to be undone from left to right.
    for column in np.flatnonzero(spatial.any(0)):
        if column:
            here = spatial[:, column]
            out[:, here, column] += out[:, here, column - 1]
    return _joined(out, shape)


def nearly(picture: Pixels, base: Pixels, bound: int) -> Pixels:
    """A picture no further than `bound` levels from `picture` in any value, that compresses well
    against `base`."""
    step = 2 * bound + 1
    values, before = picture.astype(np.int16), base.astype(np.int16)
    change = before + step * np.rint((values - before) / step).astype(np.int16)
    coarse = step * np.rint(values / step).astype(np.int16)
    changed, coarsened = (x.clip(0, 255).astype(np.uint8) for x in (change, coarse))
    rows, old = _rows(picture), _rows(base)
    spatial = _cost(_residual(rows, _shifted(rows))) < _cost(_residual(rows, old))
    where = _spread(spatial, rows.shape)[..., None]
    chosen: Pixels = np.where(where, _rows(coarsened), _rows(changed)).reshape(picture.shape)
    return chosen


def _rows(picture: Pixels) -> Pixels:
    """(..., h, w, 3) -> (rows, w, 3)."""
    return picture.reshape(-1, *picture.shape[-2:])


def _shifted(rows: Pixels) -> Pixels:
    """The left neighbour of every pixel, 0 at the edge."""
    out = np.zeros_like(rows)
    out[:, 1:] = rows[:, :-1]
    return out


def _residual(rows: Pixels, prediction: Pixels) -> Pixels:
    """(rows, w, 3) -> (3, rows, w), modulo 256, red and blue against green."""
    residual = rows - prediction
    residual[..., 0] -= residual[..., 1]
    residual[..., 2] -= residual[..., 1]
    return np.ascontiguousarray(np.moveaxis(residual, -1, 0))


def _cost(residual: Pixels) -> NDArray[np.int64]:
    """How large the residuals of each block are: (3, rows, w) -> blocks."""
    _, rows, width = residual.shape
    size = np.abs(residual.view(np.int8).astype(np.int16)).sum(0)
    padded = np.pad(size, ((0, -rows % _SIDE), (0, -width % _SIDE)))
    blocks = padded.reshape(padded.shape[0] // _SIDE, _SIDE, padded.shape[1] // _SIDE, _SIDE)
    total: NDArray[np.int64] = blocks.sum((1, 3))
    return total


def _spread(blocks: NDArray[np.bool_], shape: tuple[int, ...]) -> NDArray[np.bool_]:
    """One value per block -> one per pixel."""
    return blocks.repeat(_SIDE, 0).repeat(_SIDE, 1)[: shape[0], : shape[1]]


def _joined(planes: Pixels, shape: tuple[int, ...]) -> Pixels:
    return np.ascontiguousarray(np.moveaxis(planes, 0, -1)).reshape(shape)
