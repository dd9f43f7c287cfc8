"""Similar arrays share a base; every bit comes back, or every value within the stated bound."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ctrlcache.errors import CorruptRecord, InvalidInput
from worldcache.merge import base_of, pack_alone, pack_difference, restore, signature, unlike

MARK, BASE = b"p" * 16, b"b" * 16


def same_bits(one, other):
    return (
        one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    )


def back(packed, base=None):
    array, bound = restore(packed.payload, MARK, lambda id: base if id == BASE else None)
    assert bound == packed.bound
    return array


def picture(seed=0, height=64, width=64):
    draw = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width] / 64
    smooth = np.stack([128 + 90 * np.sin(5 * x + 3 * y + p) for p in draw.uniform(0, 6, 3)], -1)
    return (smooth + draw.normal(0, 2, smooth.shape)).round().clip(0, 255).astype(np.uint8)


def moved(frame, at):
    """The same view with something in another place."""
    after = frame.copy()
    after[at : at + 12, at : at + 9] = picture(9, 12, 9)
    return after


ARRAYS = st.one_of(
    hnp.arrays(np.uint8, hnp.array_shapes(min_dims=1, max_dims=4, max_side=9)),
    hnp.arrays(np.uint8, st.tuples(st.integers(1, 11), st.integers(1, 13), st.just(3))),
    hnp.arrays(np.float32, hnp.array_shapes(max_dims=3, max_side=7)),
    hnp.arrays(np.float16, hnp.array_shapes(max_dims=2, max_side=7)),
    hnp.arrays(np.int32, hnp.array_shapes(max_dims=2, max_side=7)),
)


@settings(max_examples=40)
@given(ARRAYS)
def test_alone_every_bit_comes_back(array):
    """Whatever its type, shape and values (infinities and NaN too)."""
    assert same_bits(back(pack_alone(array, MARK)), array)


@settings(max_examples=40)
@given(ARRAYS, st.integers(0, 2**32 - 1))
def test_a_difference_gives_every_bit_back(array, seed):
    """Exact mode is exact, also for a base that has nothing to do with the array."""
    base = np.random.default_rng(seed).permutation(array.reshape(-1)).reshape(array.shape)
    packed = pack_difference(array, base, BASE, MARK, alone_bytes=1 << 30)
    picture = array.dtype == np.uint8 and array.ndim >= 3 and array.shape[-1] == 3
    assert (packed is not None) == (picture or array.dtype.kind == "f")
    if packed is not None:
        assert packed.bound == 0
        assert same_bits(back(packed, base), array)


@settings(max_examples=40)
@given(ARRAYS, st.floats(1e-4, 0.4), st.integers(0, 2**32 - 1))
def test_the_bound_is_kept(array, max_error, seed):
    """No value is further from the truth than is stated, and not more is stated than was asked."""
    base = np.random.default_rng(seed).permutation(array.reshape(-1)).reshape(array.shape)
    packed = pack_difference(array, base, BASE, MARK, max_error, alone_bytes=1 << 30)
    if packed is None:
        return
    restored = back(packed, base)
    if packed.bound == 0:
        assert same_bits(restored, array)
        return
    scale = 255 if array.dtype == np.uint8 else np.abs(base).max()
    assert packed.bound <= max_error * float(scale)
    assert np.abs(restored.astype(np.float64) - array.astype(np.float64)).max() <= packed.bound


def test_what_stands_still_is_not_stored_again():
    """A frame of a fixed camera takes a fraction of what it takes alone."""
    base = picture()
    frame = moved(base, 20)
    alone = len(pack_alone(frame, MARK).payload)
    exact = pack_difference(frame, base, BASE, MARK)
    near = pack_difference(frame + np.uint8(1), base, BASE, MARK, 0.01)
    assert len(exact.payload) < 0.25 * alone
    assert near.bound == 2
    assert len(near.payload) < 0.25 * alone
    assert base_of(exact.payload, MARK) == BASE
    assert base_of(pack_alone(frame, MARK).payload, MARK) is None


def test_what_has_nothing_in_common_is_not_stored_as_a_difference():
    """A difference that does not pay is refused, as is one to another shape or type."""
    frame = picture(1)
    noise = np.random.default_rng(0).integers(0, 256, frame.shape, np.uint8)
    assert pack_difference(noise, frame, BASE, MARK) is None
    assert pack_difference(frame, frame[:32], BASE, MARK) is None
    assert pack_difference(frame, frame.astype(np.float32), BASE, MARK) is None


def test_a_base_that_is_gone_is_a_miss_and_another_one_is_damage():
    """A difference without its base cannot be restored, and one on a wrong base is noticed."""
    frame = picture()
    packed = pack_difference(moved(frame, 8), frame, BASE, MARK)
    assert restore(packed.payload, MARK, lambda _: None) is None
    with pytest.raises(CorruptRecord, match="shape"):
        restore(packed.payload, MARK, lambda _: frame[:32])


@settings(max_examples=40)
@given(st.data())
def test_damage_is_noticed(data):
    """A flipped bit anywhere, or another provenance, is CorruptRecord, never a wrong array."""
    packed = pack_alone(picture(2, 12, 12), MARK).payload
    place = data.draw(st.integers(0, len(packed) - 1))
    broken = bytearray(packed)
    broken[place] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptRecord):
        restore(bytes(broken), MARK, lambda _: None)
    with pytest.raises(CorruptRecord, match="provenance"):
        restore(packed, b"q" * 16, lambda _: None)


def test_a_bound_that_is_no_bound_is_refused():
    """max_error is a share of full scale."""
    with pytest.raises(InvalidInput, match="max_error"):
        pack_difference(picture(), picture(), BASE, MARK, 1.5)


def test_alike_is_told_from_unlike():
    """A moved object makes less of a difference than another scene; shapes tell at once."""
    one, other = picture(1), picture(2)
    assert unlike(signature(one), signature(one)) == 0
    assert unlike(signature(one), signature(moved(one, 30))) < unlike(
        signature(one), signature(other)
    )
    assert unlike(signature(one), signature(np.zeros((2, 2)))) == np.inf
