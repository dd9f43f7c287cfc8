"""The codec: every couplet comes back, every flipped bit is noticed, provenances never mix."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from hunting import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ctrlcache.couplet import ALL_FIELDS, Couplet, decode, decode_array, encode, encode_array
from ctrlcache.errors import CorruptRecord, InvalidInput

OWNER = b"provenance-digest"[:16]
relaxed = settings(suppress_health_check=[HealthCheck.too_slow])
# Values that quantisation and comparison have trouble with.
SPECIAL = np.float32([0.0, -0.0, 1.0, -1.0, 1e-38, 1e-45, 3e38, -3e38, 127.0, 1 / 3])


@st.composite
def floats(draw: st.DrawFn, *shape: int) -> np.ndarray:
    """Drawn by a seed, which is a hundred times faster than number by number."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    array = rng.normal(size=shape).astype(np.float32) * np.float32(10.0) ** draw(st.integers(-9, 9))
    special = rng.random(shape) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    return np.where(special, rng.choice(SPECIAL, shape), array).astype(np.float32)


@st.composite
def couplets(draw: st.DrawFn) -> Couplet:
    horizon, controls, state = (draw(st.integers(1, 4)) for _ in range(3))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    frames = rng.integers(0, 256, (horizon, 5, draw(st.integers(0, 6)), 3), np.uint8)
    jacobian = rng.normal(size=(horizon, state, controls)).astype(np.float16)
    number = st.floats(0, 1e9)
    return Couplet(
        draw(st.binary(min_size=16, max_size=16)),
        draw(floats(horizon, controls)),
        draw(floats(horizon, state)),
        draw(st.none() | floats(horizon, 3, draw(st.integers(1, 5)))),
        draw(st.none() | floats(2, 2, 3, 4) | floats(5)),
        draw(st.sampled_from([None, frames, frames // 200])),
        draw(st.sampled_from([None, jacobian])),
        *(draw(number) for _ in range(6)),
        lineage=draw(st.text(max_size=20)),
    )


def same(left: Couplet, right: Couplet, but: frozenset[str] = frozenset()) -> None:
    for item in fields(Couplet):
        if item.name in but:
            continue
        a, b = getattr(left, item.name), getattr(right, item.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype, item.name
            np.testing.assert_array_equal(a, b, err_msg=item.name)
        else:
            assert a == b, item.name


@relaxed
@given(couplets())
def test_raw_round_trip(couplet: Couplet) -> None:
    """Raw, a couplet comes back as it was, bit for bit."""
    back = decode(encode(couplet, OWNER, "raw"), OWNER)
    same(couplet, back)
    assert back.id == couplet.id


@relaxed
@given(couplets())
def test_stored_round_trip(couplet: Couplet) -> None:
    """Stored, all but tokens and slice come back as they were; those within half a step of int8."""
    back = decode(encode(couplet, OWNER, "stored"), OWNER)
    same(couplet, back, frozenset({"tokens", "slice", "lossy"}))
    assert back.lossy == (couplet.tokens is not None or couplet.slice is not None)
    for a, b in ((couplet.tokens, back.tokens), (couplet.slice, back.slice)):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            exact = a[-len(b) :]
            step = np.abs(exact).max(axis=-1, keepdims=True) / 127
            assert (np.abs(exact - b) <= step * 0.5001 + 1e-30).all()


def test_lossy_stays_lossy() -> None:
    """A couplet that lost precision once never passes for exact again, however it is written."""
    couplet = example(tokens=np.ones((2, 3, 4), np.float32))
    once = decode(encode(couplet, OWNER, "stored"), OWNER)
    assert once.lossy
    assert decode(encode(once, OWNER, "raw"), OWNER).lossy


def test_states_alone_are_not_lossy() -> None:
    """States, frames and jacobian are exact in both encodings."""
    assert not decode(encode(example(), OWNER, "stored"), OWNER).lossy


def example(**changes: object) -> Couplet:
    plan = np.tile(np.float32([0.1, -0.2]), (2, 1))
    base: dict[str, object] = {"space": b"s" * 16, "plan": plan, "states": np.ones((2, 3), "f4")}
    return Couplet(**{**base, **changes})  # type: ignore[arg-type]


@settings(relaxed, max_examples=examples(30))
@given(couplets(), st.sampled_from(["raw", "stored"]), st.data())
def test_any_flipped_bit_is_detected(couplet: Couplet, precision: str, data: st.DataObject) -> None:
    """One flipped bit anywhere in a record is a CorruptRecord, never a wrong answer."""
    record = encode(couplet, OWNER, precision)  # type: ignore[arg-type]
    for bit in data.draw(st.lists(st.integers(0, 8 * len(record) - 1), min_size=20, max_size=20)):
        damaged = bytearray(record)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptRecord):
            decode(bytes(damaged), OWNER)


@pytest.mark.parametrize("precision", ["raw", "stored"])
def test_every_single_bit_of_one_record(precision: str) -> None:
    """All bits of a whole couplet, one after the other: each flip is detected."""
    record = encode(
        example(
            tokens=np.ones((2, 2, 3), np.float32),
            slice=np.ones((2, 1, 2, 3), np.float32),
            frames=np.full((2, 2, 3, 3), 7, np.uint8),
            jacobian=np.ones((2, 3, 2), np.float16),
        ),
        OWNER,
        precision,  # type: ignore[arg-type]
    )
    damaged = bytearray(record)
    for bit in range(8 * len(record)):
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptRecord):
            decode(bytes(damaged), OWNER)
        damaged[bit // 8] ^= 1 << bit % 8
    decode(bytes(damaged), OWNER)


@relaxed
@given(couplets(), st.integers(0, 2000), st.binary(min_size=1, max_size=9))
def test_cut_or_lengthened_records(couplet: Couplet, cut: int, tail: bytes) -> None:
    """A record that lost its end, or has something after it, is damaged."""
    record = encode(couplet, OWNER, "raw")
    for wrong in (record[: min(cut, len(record) - 1)], record + tail):
        with pytest.raises(CorruptRecord):
            decode(wrong, OWNER)


@relaxed
@given(st.binary(max_size=300))
def test_noise_is_not_a_couplet(noise: bytes) -> None:
    """Arbitrary bytes are refused, with or without the right first bytes."""
    for data in (noise, encode(example(), OWNER, "raw")[:30] + noise):
        with pytest.raises(CorruptRecord):
            decode(data, OWNER)


@relaxed
@given(couplets(), st.binary(min_size=16, max_size=16))
def test_provenances_never_answer_for_each_other(couplet: Couplet, other: bytes) -> None:
    """A record of one provenance is damaged in the eyes of every other."""
    record = encode(couplet, OWNER, "raw")
    if other != OWNER:
        with pytest.raises(CorruptRecord, match="provenance"):
            decode(record, other)


@relaxed
@given(couplets(), st.sets(st.sampled_from(sorted(ALL_FIELDS))))
def test_only_wanted_fields_are_read(couplet: Couplet, wanted: set[str]) -> None:
    """Fields that were not asked for are absent, and their damage does not matter."""
    record = bytearray(encode(couplet, OWNER, "raw"))
    part = decode(bytes(record), OWNER, wanted)
    assert part.fields == couplet.fields & wanted
    same(couplet, part, ALL_FIELDS - wanted)
    if couplet.frames is not None and couplet.frames.size and "frames" not in wanted:
        record[-1 - (-couplet.frames.nbytes % 8)] ^= 1  # the last byte of the last section
        same(part, decode(bytes(record), OWNER, wanted))


def test_a_view_is_copied() -> None:
    """Arrays read from a memoryview survive a change of what it shows."""
    source = bytearray(encode(example(), OWNER, "raw"))
    couplet = decode(memoryview(source), OWNER)
    source[:] = bytes(len(source))
    same(example(), couplet)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"space": b"short"}, "space"),
        ({"plan": np.zeros(4, "f4")}, "plan"),
        ({"states": np.zeros((3, 3), "f4")}, "states"),
        ({"jacobian": np.zeros((2, 2, 3), "f2")}, "jacobian"),
        ({"tokens": np.zeros((2, 2), "f4")}, "tokens"),
        ({"frames": np.zeros((1, 2, 2, 3), "u1")}, "frames"),
        ({"radius": -1.0}, "radius"),
        ({"cost_ms": float("nan")}, "cost_ms"),
        ({"lineage": "x" * 256}, "lineage"),
    ],
)
def test_malformed_couplets_are_refused(changes: dict[str, object], text: str) -> None:
    """What does not fit together is refused with the name of the field."""
    with pytest.raises(InvalidInput, match=text):
        encode(example(**changes), OWNER, "raw")


def test_reference_size_fits_the_budget() -> None:
    """A full couplet of the reference model's shapes takes at most 184 KB, with incompressible
    floats and frames in which a third of the pixels move."""
    rng = np.random.default_rng(0)
    base = np.clip(rng.normal(128, 3, (64, 64, 3)).cumsum(1) / 20 + 100, 0, 255).astype(np.uint8)
    frames = np.repeat(base[None], 8, axis=0)
    moving = frames[:, :, 20:42].astype(int) + rng.integers(-6, 7, (8, 64, 22, 3))
    frames[:, :, 20:42] = np.clip(moving, 0, 255)
    couplet = Couplet(
        b"s" * 16,
        np.tile(rng.uniform(-1, 1, 4).astype("f4"), (8, 1)),
        rng.normal(size=(8, 256)).astype("f4"),
        rng.normal(size=(8, 65, 192)).astype("f4"),
        rng.normal(size=(4, 2, 66, 192)).astype("f4"),
        frames,
        rng.normal(size=(8, 256, 4)).astype("f2"),
    )
    assert len(encode(couplet, OWNER, "stored")) <= 184_000


@st.composite
def arrays(draw: st.DrawFn) -> np.ndarray:
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=6, min_side=0, max_side=4))
    dtype = np.dtype(draw(st.sampled_from(["f4", "f2", "u1", "i1", "i4", "i8", "f8"])))
    count = int(np.prod(shape))
    noise = np.random.default_rng(draw(st.integers(0, 2**32))).bytes(count * dtype.itemsize)
    return np.frombuffer(noise, dtype).reshape(shape)


@relaxed
@given(arrays(), st.booleans())
def test_arrays_round_trip(array: np.ndarray, compress: bool) -> None:
    """Arrays come back bit for bit, NaN payloads included."""
    back = decode_array(encode_array(array, OWNER, compress), OWNER)
    assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes())


@relaxed
@given(arrays(), st.data())
def test_flipped_bits_in_arrays_are_detected(array: np.ndarray, data: st.DataObject) -> None:
    """One flipped bit in an array's record is a CorruptRecord."""
    record = bytearray(encode_array(array, OWNER))
    bit = data.draw(st.integers(0, 8 * len(record) - 1))
    record[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptRecord):
        decode_array(bytes(record), OWNER)


def test_kinds_are_not_confused() -> None:
    """An array's record is not a couplet, nor the other way round."""
    with pytest.raises(CorruptRecord, match="magic"):
        decode(encode_array(np.zeros(3, "f4"), OWNER), OWNER)
    with pytest.raises(CorruptRecord, match="magic"):
        decode_array(encode(example(), OWNER, "raw"), OWNER)


def test_arrays_of_other_types_are_refused() -> None:
    """What the layout cannot hold is an InvalidInput that says what it can."""
    for array in (np.zeros(2, "c8"), np.zeros((1,) * 7, "f4"), np.array(["a"])):
        with pytest.raises(InvalidInput, match="expected one of"):
            encode_array(array, OWNER)
