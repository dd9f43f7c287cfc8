"""Names: equal for equal things, different for everything else."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrlcache import key
from ctrlcache.errors import InvalidInput

BASE = key.Provenance("world_model", "1", "abc", "float32", (64, 64), "device-a", "tenant")


def test_parts_do_not_run_together() -> None:
    """Moving a boundary between parts gives another digest."""
    assert key.digest(b"ab", b"c") != key.digest(b"a", b"bc") != key.digest(b"abc")
    assert len(key.digest()) == key.DIGEST_BYTES


@given(st.lists(st.binary(max_size=9), max_size=4), st.lists(st.binary(max_size=9), max_size=4))
def test_digest_separates_all_part_lists(left: list[bytes], right: list[bytes]) -> None:
    """Two lists of parts share a digest only when they are equal."""
    assert (key.digest(*left) == key.digest(*right)) == (left == right)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"version": "2"},
        {"weights_digest": "abd"},
        {"dtype": "bfloat16"},
        {"frame_px": (64, 65)},
        {"calibration_epoch": "device-b"},
        {"tenant": "another"},
    ],
)
def test_every_field_of_provenance_reaches_every_name(change: dict[str, object]) -> None:
    """Change any field of the provenance and no name derived from it stays the same."""
    other = replace(BASE, **change)  # type: ignore[arg-type]
    plan = np.zeros((8, 4), np.float32)

    def names(provenance: key.Provenance) -> set[bytes]:
        root = key.context_root(provenance, b"prompt", b"frame")
        space = key.space_id(root, 8, 0)
        return {root, space, key.couplet_id(space, plan), key.slice_id(root, plan[0])}

    assert not names(BASE) & names(other)


def test_context_depends_on_all_that_happened() -> None:
    """Control, frame, order and whether the frame was seen or predicted all matter."""
    root = key.context_root(BASE, b"", b"frame 0")
    a, b = np.full(4, 0.1), np.full(4, 0.2)
    seen = key.context_next(root, a, b"frame 1")
    assert (
        len(
            {
                root,
                seen,
                key.context_next(root, a, None),
                key.context_next(root, b, b"frame 1"),
                key.context_next(root, a, b"frame 2"),
                key.context_next(root, a, b""),
                key.context_root(BASE, b"other", b"frame 0"),
                key.frame_id(root),
            }
        )
        == 8
    )
    assert key.context_next(root, a.astype(np.float32), b"frame 1") == seen


def test_space_depends_on_horizon_and_seed() -> None:
    """Answers over other horizons or seeds are not neighbours."""
    assert len({key.space_id(b"c", h, s) for h in (1, 11, 8) for s in (0, 1, -1, 10**12)}) == 12


@given(st.lists(st.floats(-1, 1, width=32), min_size=1, max_size=6))
def test_equal_controls_have_equal_names(values: list[float]) -> None:
    """Type, layout and the sign of zero do not change a name; the value does."""
    control = np.array(values, np.float32)
    same = np.array([(v, 9) for v in values], np.float64)[:, 0]  # another type, not contiguous
    same[same == 0] = -0.0
    assert key.slice_id(b"c", control) == key.slice_id(b"c", same)
    moved = control.copy()
    moved[-1] = np.nextafter(moved[-1], np.float32(2))
    assert key.slice_id(b"c", control) != key.slice_id(b"c", moved)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_controls_must_be_finite(bad: float) -> None:
    """NaN and infinity have no place in a name."""
    with pytest.raises(InvalidInput, match="finite"):
        key.couplet_id(b"s", np.array([[0.0, bad]]))


def test_large_finite_controls_are_accepted() -> None:
    """A sum that overflows does not make finite controls infinite."""
    assert key.slice_id(b"c", np.full(4, 3e38)) != key.slice_id(b"c", np.full(4, 2e38))


_NUMBERS = st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, 2.0**-149, 128.0]))


@given(st.lists(_NUMBERS, min_size=1, max_size=4), st.integers(1, 5), st.booleans())
def test_a_plan_is_named_by_its_numbers(step: list[float], steps: int, varied: bool) -> None:
    """However it is looked at, a plan has the name of its canonical numbers, is held where all
    steps are equal (0.0 and -0.0 are), and is refused where a number is not finite."""
    plan = np.tile(np.array(step, np.float32), (steps, 1))
    if varied:
        plan[-1] = -plan[-1]
    if not np.isfinite(plan).all():
        with pytest.raises(InvalidInput, match="finite"):
            key.plan_key(b"s" * 16, plan)
        return
    canonical = np.where(plan == 0, np.float32(0), plan)
    lengths = struct.pack("<QQ", steps, canonical.nbytes)
    named = hashlib.blake2b(b"couplet" + b"s" * 16 + lengths + canonical.tobytes(), digest_size=16)
    assert key.plan_key(b"s" * 16, plan) == (named.digest(), bool((plan == plan[0]).all()))


def test_held_plans() -> None:
    """A plan is held when all of its steps are the same."""
    plan = np.tile(np.float32([0.1, 0.2]), (3, 1))
    assert key.is_held(plan)
    plan[2, 1] = 0.3
    assert not key.is_held(plan)
