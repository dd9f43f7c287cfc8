"""Segment files: what a scan finds again, whatever happened to the bytes."""

from __future__ import annotations

import os
import resource
from pathlib import Path

import numpy as np
import pytest
from hunting import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ctrlcache.errors import CorruptRecord, InvalidInput
from ctrlcache.tiers import segment_scan, segments
from ctrlcache.tiers.base import Entry
from ctrlcache.tiers.segment_scan import Damage
from ctrlcache.tiers.segment_writer import Pending, SegmentWriter
from ctrlcache.tiers.segments import Header

quick = settings(
    max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture]
)
floats = st.floats(allow_nan=False, width=64)
controls = st.none() | st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=9).map(np.float32)
entries = st.builds(
    Entry,
    id=st.binary(min_size=16, max_size=16),
    space=st.binary(min_size=16, max_size=16),
    control=controls,
    radius=floats,
    curvature=floats,
    cost_ms=floats,
    created_s=floats,
)
pendings = st.builds(Pending, entry=entries, payload=st.binary(max_size=300))


def write(directory: Path, items: list[Pending], seal: bool = False) -> list[Header]:
    writer = SegmentWriter(directory, 1 << 20, False, 1, 0)
    headers = writer.append(items)
    if seal:
        writer.seal()
    writer.abandon()
    return headers


def scan(path: Path, verify: bool = True, start: int = 0) -> list[Header | Damage]:
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        return list(segment_scan.scan(file.fileno(), 1, start, size, verify_payload=verify))


def same(left: Entry, right: Entry) -> bool:
    a, b = (None if e.control is None else e.control.tolist() for e in (left, right))
    plain = [(e.id, e.space, e.radius, e.curvature, e.cost_ms, e.created_s) for e in (left, right)]
    return a == b and plain[0] == plain[1]


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path


@quick
@given(items=st.lists(pendings, min_size=1, max_size=12))
def test_a_scan_finds_what_was_appended(directory: Path, items: list[Pending]) -> None:
    """Every field and payload of any record comes back, in order, where it says it is."""
    path = segments.segment_path(directory, 1)
    path.unlink(missing_ok=True)
    written = write(directory, items)
    found = scan(path)
    assert found == written
    with path.open("rb") as file:
        for item, header in zip(items, written, strict=True):
            assert same(header.entry, item.entry)
            again, payload = segments.read_record(
                file.fileno(), 1, header.offset, header.header_bytes, header.payload_bytes
            )
            assert again == header
            assert payload == item.payload


@quick
@given(items=st.lists(pendings, min_size=1, max_size=8), data=st.data())
def test_a_flipped_bit_costs_one_record_and_is_reported(
    directory: Path, items: list[Pending], data: st.DataObject
) -> None:
    """Whichever bit of a record flips, that record is damage and all others are found."""
    path = segments.segment_path(directory, 1)
    path.unlink(missing_ok=True)
    written = write(directory, items)
    raw = bytearray(path.read_bytes())
    at = data.draw(st.integers(segments.SEGMENT_HEADER_BYTES, len(raw) - 1))
    raw[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(raw)
    hit = next(header for header in written if header.offset <= at < header.end)
    found = scan(path)
    assert [item for item in found if isinstance(item, Header)] == [
        header for header in written if header is not hit
    ]
    (damage,) = [item for item in found if isinstance(item, Damage)]
    assert damage.offset == hit.offset
    assert damage.torn == (hit is written[-1])


@quick
@given(items=st.lists(pendings, min_size=1, max_size=8), data=st.data())
def test_a_torn_tail_costs_only_what_is_torn(
    directory: Path, items: list[Pending], data: st.DataObject
) -> None:
    """A file cut anywhere gives the records before the cut, and one piece that is cut off."""
    path = segments.segment_path(directory, 1)
    path.unlink(missing_ok=True)
    written = write(directory, items)
    size = data.draw(st.integers(segments.SEGMENT_HEADER_BYTES, written[-1].end))
    os.truncate(path, size)
    found = scan(path, verify=False)
    whole = [header for header in written if header.end <= size]
    assert found[: len(whole)] == whole
    rest = found[len(whole) :]
    if (whole and whole[-1].end == size) or size == segments.SEGMENT_HEADER_BYTES:
        assert not rest
    else:
        (damage,) = rest
        assert isinstance(damage, Damage)
        assert damage.cut
        assert damage.torn


@quick
@given(items=st.lists(pendings, min_size=1, max_size=8), data=st.data())
def test_a_footer_tells_the_truth_or_nothing(
    directory: Path, items: list[Pending], data: st.DataObject
) -> None:
    """A sealed segment's footer lists all headers; with a bit flipped it lists none, never wrong
    ones."""
    path = segments.segment_path(directory, 1)
    path.unlink(missing_ok=True)
    payload = bytes(
        segments.header_bytes(9) * 16 * (len(items) + 1)
    )  # makes a footer worth its bytes
    written = write(directory, [*items, Pending(items[0].entry, payload)], seal=True)
    raw = bytearray(path.read_bytes())
    with path.open("rb") as file:
        footer = segments.read_footer(file.fileno(), 1, len(raw))
    assert footer is not None
    assert footer.headers() == tuple(written)
    assert footer.end == written[-1].end
    at = data.draw(st.integers(footer.end, len(raw) - 1))
    raw[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(raw)
    with path.open("rb") as file:
        footer = segments.read_footer(file.fileno(), 1, len(raw))
    assert footer is None or (footer.raw is None and footer.damaged)


@quick
@given(items=st.lists(pendings, min_size=1, max_size=6), data=st.data())
def test_an_unfinished_seal_is_no_damage(
    directory: Path, items: list[Pending], data: st.DataObject
) -> None:
    """A file cut within its footer or trailer gives all records, and nothing else that counts."""
    path = segments.segment_path(directory, 1)
    path.unlink(missing_ok=True)
    payload = bytes(segments.header_bytes(9) * 16 * (len(items) + 1))
    large = data.draw(st.booleans())  # without it the segment does without a footer
    written = write(
        directory, [*items, Pending(items[0].entry, payload)][: None if large else -1], seal=True
    )
    size = data.draw(st.integers(written[-1].end, path.stat().st_size - 1))
    os.truncate(path, size)
    found = scan(path)
    assert [item for item in found if isinstance(item, Header)] == written
    assert all(item.cut for item in found if isinstance(item, Damage))


def test_small_records_do_without_a_footer(directory: Path) -> None:
    """Where headers are much of the segment, repeating them would cost more than a scan."""
    item = Pending(Entry(bytes(16), bytes(16), None, 0, 0, 0, 0), b"x")
    written = write(directory, [item] * 50, seal=True)
    path = segments.segment_path(directory, 1)
    with path.open("rb") as file:
        footer = segments.read_footer(file.fileno(), 1, path.stat().st_size)
    assert footer == segments.Footer(1, written[-1].end, 50, None)
    assert scan(path)[:50] == written


def test_a_record_inside_a_payload_is_not_a_record(directory: Path) -> None:
    """A payload that holds a copy of a segment never yields records of its own, even when the
    header before it is destroyed and the scan has to search."""
    inner = [Pending(Entry(bytes([n]) * 16, bytes(16), None, 0, 0, 0, 0), b"p") for n in range(3)]
    write(directory, inner)
    path = segments.segment_path(directory, 1)
    copy = path.read_bytes()
    path.unlink()
    outer = Pending(Entry(b"o" * 16, bytes(16), None, 0, 0, 0, 0), copy)
    last = Pending(Entry(b"l" * 16, bytes(16), None, 0, 0, 0, 0), b"")
    written = write(directory, [outer, last])
    raw = bytearray(path.read_bytes())
    raw[written[0].offset] ^= 0xFF
    path.write_bytes(raw)
    assert [item for item in scan(path) if isinstance(item, Header)] == [written[1]]


def test_a_record_in_another_place_is_refused(directory: Path) -> None:
    """A valid record at the wrong offset or of another segment is corrupt, not an answer."""
    items = [Pending(Entry(bytes([n]) * 16, bytes(16), None, 0, 0, 0, 0), b"pp") for n in range(2)]
    first, second = write(directory, items)
    path = segments.segment_path(directory, 1)
    raw = path.read_bytes()
    swapped = raw[: first.offset] + raw[second.offset :] + raw[first.offset : first.end]
    path.write_bytes(swapped)
    with (
        path.open("rb") as file,
        pytest.raises(CorruptRecord, match="in another place"),
    ):
        segments.read_record(file.fileno(), 1, first.offset, first.header_bytes, 2)


def test_a_full_disk_leaves_the_segment_as_it_was(directory: Path) -> None:
    """A group that does not fit is taken back whole, and the writer goes on when it can."""
    items = [Pending(Entry(bytes([n]) * 16, bytes(16), None, 0, 0, 0, 0), b"p") for n in range(3)]
    writer = SegmentWriter(directory, 1 << 20, True, 1, 0)
    written = writer.append(items)
    writer.sync()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    path = segments.segment_path(directory, 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5_000, hard))
    try:
        with pytest.raises(OSError, match="too large"):
            writer.append([Pending(items[0].entry, bytes(50_000))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.stat().st_size == written[-1].end
    written += writer.append(items)
    assert scan(path) == written


def test_what_cannot_be_stored_is_refused(directory: Path) -> None:
    """The error names what was wrong with the entry."""
    writer = SegmentWriter(directory, 1 << 20, False, 1, 0)
    good = Entry(bytes(16), bytes(16), None, 0, 0, 0, 0)
    with pytest.raises(InvalidInput, match="16 bytes each, got 3 and 16"):
        writer.append([Pending(Entry(b"abc", bytes(16), None, 0, 0, 0, 0), b"")])
    two = np.zeros((2, 2), np.float32)
    with pytest.raises(InvalidInput, match=r"\(2, 2\)"):
        writer.append([Pending(Entry(bytes(16), bytes(16), two, 0, 0, 0, 0), b"")])
    assert len(writer.append([Pending(good, b"")])) == 1
