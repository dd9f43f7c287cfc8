"""Bytes that nobody can vouch for: whatever they hold, they are a counted miss or what they say.

Damage that a checksum catches is the smaller part: here the checksums are made right again, as an
attacker with access to the object store would, so that everything behind them is reached.
"""

from __future__ import annotations

import json
import struct
from dataclasses import replace

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ctrlcache import record
from ctrlcache.couplet import Couplet, decode, decode_array, encode, encode_array
from ctrlcache.errors import CorruptRecord
from ctrlcache.metrics import Corrupt, Event
from ctrlcache.templates import decode_templates, typical_controls
from ctrlcache.tiers.base import Entry, Record
from ctrlcache.tiers.cold import ColdTier
from ctrlcache.tiers.cold_store import ColdStore
from worldserve.session import decode_session

OWNER = b"o" * 16
SPACE = b"s" * 16
_HEAD, _SECTION = struct.Struct("<4sHHHHIQ16s"), struct.Struct("<BBBBIIIQ6I")
_INTERESTING = [0, 1, 2, 7, 8, 127, 128, 255, 256, 65535, 65536, 2**31 - 1, 2**31, 2**32 - 1]
patient = settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def example(seed: int = 0, **changes: object) -> Couplet:
    draw = np.random.default_rng(seed)
    base = {
        "space": SPACE,
        "plan": np.tile(draw.uniform(-1, 1, 2).astype("f4"), (3, 1)),
        "states": draw.normal(size=(3, 5)).astype("f4"),
        "tokens": draw.normal(size=(3, 4, 2)).astype("f4"),
        "slice": draw.normal(size=(2, 4, 2)).astype("f4"),
        "frames": draw.integers(0, 9, (3, 8, 8, 3), np.uint8),
        "jacobian": draw.normal(size=(3, 5, 2)).astype("f2"),
    }
    return Couplet(**{**base, **changes})  # type: ignore[arg-type]


RECORDS = [encode(example(n), OWNER, p) for n in range(2) for p in ("raw", "stored")] + [  # type: ignore[arg-type]
    encode_array(np.arange(60, dtype="f4").reshape(3, 4, 5), OWNER, compress=True)
]


def reseal(data: bytes) -> bytes:
    """The record with all checksums right, as far as its header can be made sense of."""
    made = bytearray(data)
    if len(made) < _HEAD.size:
        return data
    _, _, _, count, _, header_bytes, _, _ = _HEAD.unpack_from(made)
    table_end = header_bytes - 8
    start = table_end - count * _SECTION.size
    if not _HEAD.size <= start <= table_end <= len(made) - 8:
        return data
    position = header_bytes
    for at in range(start, table_end, _SECTION.size):
        stored = struct.unpack_from("<I", made, at + 4)[0]
        body = bytes(made[position : position + stored + -stored % 8])
        struct.pack_into("<Q", made, at + 16, xxhash.xxh3_64_intdigest(body))
        position += stored + -stored % 8
    struct.pack_into("<Q", made, table_end, xxhash.xxh3_64_intdigest(bytes(made[:table_end])))
    return bytes(made)


@st.composite
def tampered(draw: st.DrawFn) -> bytes:
    """A record with some bytes or words set, cut or lengthened, and mostly with right checksums."""
    made = bytearray(draw(st.sampled_from(RECORDS)))
    for _ in range(draw(st.integers(0, 4))):
        width = draw(st.sampled_from([1, 1, 2, 4]))
        # Mostly in the header, where a byte means most.
        end = draw(st.sampled_from([_HEAD.size, 400, len(made)]))
        at = draw(st.integers(0, min(end, len(made)) - width))
        value = draw(st.sampled_from(_INTERESTING) | st.integers(0, 2**32 - 1))
        made[at : at + width] = (value % 256**width).to_bytes(width, "little")
    if draw(st.integers(0, 9)) == 0:
        del made[draw(st.integers(0, len(made))) :]
        made += draw(st.binary(max_size=64))
    return reseal(bytes(made)) if draw(st.integers(0, 4)) else bytes(made)


@patient
@given(tampered() | st.binary(max_size=300), st.booleans())
def test_a_couplet_is_whole_or_corrupt(data: bytes, view: bool) -> None:
    """Any bytes: a Couplet or CorruptRecord, no other error."""
    given_ = memoryview(data) if view else data
    for read in (decode, decode_array):
        try:
            read(given_, OWNER)
        except CorruptRecord:
            continue


@patient
@given(tampered())
def test_resealed_templates_never_break_what_uses_them(data: bytes) -> None:
    """What an attacker may store under a right checksum: passed over, or controls that are finite
    numbers of one width."""
    good = example(5)
    records = [
        Record(Entry(good.id, SPACE, good.control, 0.1, 0.5, 1.0, 1.0), payload)
        for payload in (data, encode(good, OWNER, "stored"))
    ]
    with_right_id = []
    for each in records:
        try:
            found = decode(each.payload, OWNER, fields=("jacobian",))
            with_right_id.append(replace_id(each, found.id))
        except (CorruptRecord, ValueError):
            with_right_id.append(each)
    controls = typical_controls(decode_templates(with_right_id, OWNER), 8)
    assert controls.dtype == np.float32
    assert controls.ndim == 2
    assert np.isfinite(controls).all()


def replace_id(item: Record, id: bytes) -> Record:
    return Record(replace(item.entry, id=id), item.payload)


def test_a_compression_bomb_is_refused() -> None:
    """A few kilobytes that announce gigabytes are corrupt before any memory is taken for them."""
    size = (1 << 32) - 8
    body = zstandard.ZstdCompressor(level=3).compress(bytes(1 << 20))
    # A frame that announces what it does not hold: 4 GiB less a little.
    frame = body[:4] + bytes([0xE0]) + size.to_bytes(8, "little") + body[4 + 1 + 4 :]
    good = encode_array(np.zeros(1 << 20, np.uint8), OWNER, compress=True)
    head = bytearray(good)
    _, _, _, _, _, header_bytes, _, _ = _HEAD.unpack_from(head)
    at = header_bytes - 8 - _SECTION.size
    padded = frame + bytes(-len(frame) % 8)
    struct.pack_into("<II", head, at + 4, len(frame), size)
    struct.pack_into("<I", head, at + 24, size)
    made = bytes(head[:header_bytes]) + padded
    made = made[:16] + struct.pack("<Q", len(made)) + made[24:]
    with pytest.raises(CorruptRecord, match="holds at most"):
        decode_array(reseal(made), OWNER)


def test_resealing_works() -> None:
    """Otherwise none of the above would get past the first checksum."""
    for data in RECORDS:
        assert reseal(data) == data
        spoilt = bytearray(data)
        spoilt[-9] ^= 1
        assert reseal(bytes(spoilt)) != bytes(spoilt)


@patient
@given(st.binary(max_size=400), st.sampled_from([b"", b"CCse", b"CCsc", b"CCar"]))
def test_a_sessions_row_is_whole_or_corrupt(data: bytes, magic: bytes) -> None:
    """Any bytes in the place of a session's row."""
    sections = [record.Section(1, np.frombuffer(data[: len(data) // 8 * 8], "<f8"))]
    with pytest.raises(CorruptRecord):
        decode_session(magic + data, OWNER)
    with pytest.raises(CorruptRecord):
        decode_session(record.pack(b"CCse", OWNER, 0, data[:60], sections), OWNER)


# --- what the object store sends ------------------------------------------------------------------


class Bucket:
    """Objects in memory, with what `Objects` has that a reader needs."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects = objects

    def get(self, name: str, limit: int) -> bytes | None:
        data = self.objects.get(name)
        return None if data is None or len(data) > limit else data

    def put(self, name: str, data: bytes) -> None:
        self.objects[name] = data

    def delete(self, names: object) -> None: ...

    def close(self) -> None: ...


def stored() -> dict[str, bytes]:
    bucket = Bucket({})
    tier = ColdTier(bucket, "p", "task")  # type: ignore[arg-type]
    couplet = example()
    entry = Entry(couplet.id, SPACE, couplet.control, 0.1, 0.5, 1.0, 1.0)
    tier.put([Record(entry, encode(couplet, OWNER, "stored"))])
    return bucket.objects


STORED = stored()
[MANIFEST] = [name for name in STORED if name.endswith("manifest.json")]
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=6,
)


@st.composite
def manifests(draw: st.DrawFn) -> bytes:
    """A manifest with some of its values replaced, or anything else that is JSON, or bytes."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=200))
    made = json.loads(STORED[MANIFEST])
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.sampled_from(["", *made]))
        if place == "":
            item = (
                made["entries"][0] if isinstance(made["entries"], list) and made["entries"] else 0
            )
            if isinstance(item, dict):
                item[draw(st.sampled_from([*item, "more"]))] = draw(values)
        else:
            made[place] = draw(values)
    return json.dumps(made).encode()


@patient
@given(manifests())
def test_any_manifest_is_read_or_counted(manifest: bytes) -> None:
    """CorruptRecord and a count, or entries whose objects are what they say."""
    events: list[Event] = []
    bucket = Bucket({**STORED, MANIFEST: manifest})
    tier = ColdTier(bucket, "p", "task", on_event=events.append)  # type: ignore[arg-type]
    try:
        tier.refresh()
    except CorruptRecord:
        assert events == [Corrupt("cold")]
        return
    for held in tier.held(1 << 20):
        payload = tier.fetch(held)
        assert payload is None or decode(payload, OWNER).id == example().id


@settings(patient, max_examples=50)
@given(tampered(), manifests() | st.none())
def test_any_object_is_loaded_or_passed_over(data: bytes, manifest: bytes | None) -> None:
    """The loader's thread outlives whatever comes, and says that it is done."""
    assume(data)
    objects = {name: body if name == MANIFEST else data for name, body in STORED.items()}
    if manifest is not None:
        objects[MANIFEST] = manifest
    store = ColdStore(Bucket(objects), "p", longest_pause_s=0.01)  # type: ignore[arg-type]
    found = store.wait("task", 10.0)
    assert found is not None or store.trouble
    store.close()
