"""Sizes of inputs are bounded before anything is decoded, and waiting requests before they wait."""

from __future__ import annotations

import io
import struct
import threading
import zlib

import numpy as np
import pytest
from PIL import Image
from tiny_world import HELD, clip

from ctrlcache.errors import InvalidInput
from worldserve.gate import Gate, Overloaded
from worldserve.images import measure_frames
from worldserve.models.tiny import TinyWorldModel
from worldserve.request import RawRequest, RequestLimits, parse_request

SPEC = TinyWorldModel().spec
CONTROL = np.atleast_2d(HELD)


def png_of(width, height):
    """A PNG that says it is of this size, and holds next to nothing."""

    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(1000))
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", body)
        + chunk(b"IEND", b"")
    )  # fmt: skip


def encoded(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def parse(limits=None, **inputs):
    raw = RawRequest({"CONTROL": CONTROL, **inputs}, {}, "s", start=True)
    return parse_request(raw, SPEC, limits or RequestLimits())


@pytest.fixture
def nothing_is_decoded(monkeypatch):
    """Decoding any image fails the test."""

    def load(*_):
        raise AssertionError("an image was decoded")

    monkeypatch.setattr(Image.Image, "load", load)
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", load)


@pytest.mark.usefixtures("nothing_is_decoded")
@pytest.mark.parametrize("size", [(60_000, 60_000), (8_001, 8_000), (2**31 - 1, 2**31 - 1)])
def test_an_image_bomb_is_refused_by_its_header(size):
    """A hundred bytes that would become gigabytes."""
    with pytest.raises(InvalidInput, match="pixels"):
        parse(FRAMES_ENCODED=np.array([png_of(*size)], np.object_))


@pytest.mark.usefixtures("nothing_is_decoded")
def test_many_large_images_are_refused_together(tmp_path):
    """Each is allowed, all of them are not; nothing of the first one is decoded either."""
    frames = np.array([png_of(8_000, 8_000)] * 5, np.object_)
    with pytest.raises(InvalidInput, match="256000000 pixels in one request, got 320000000"):
        parse(FRAMES_ENCODED=frames)


def test_a_jpeg_of_a_thousand_scans_is_refused():
    """Each scan of a progressive JPEG goes over all of it: kilobytes that take minutes."""
    image = Image.fromarray(clip(1, size=64)[0])
    honest = encoded(image, "JPEG", progressive=True)
    last = honest.rindex(b"\xff\xda")
    bomb = honest[:last] + honest[last:-2] * 1_000 + honest[-2:]
    with pytest.raises(InvalidInput, match="at most 64 scans"):
        parse(FRAMES_ENCODED=np.array([bomb], np.object_))
    assert measure_frames([honest], 10_000) == 64 * 64


def test_a_progressive_jpeg_is_as_good_as_another():
    """What a browser makes is taken."""
    image = Image.fromarray(clip(1, size=64)[0])
    frames = np.array([encoded(image, "JPEG", progressive=True)], np.object_)
    assert parse(FRAMES_ENCODED=frames).frames.shape == (1, 32, 32, 3)


def test_raw_frames_count_too():
    """Their pixels are bounded by request as well as by frame."""
    limits = RequestLimits(max_request_pixels=4_000)
    frames = np.zeros((4, 32, 32, 3), np.uint8)
    with pytest.raises(InvalidInput, match="4000 pixels in one request, got 4096"):
        parse(limits, FRAMES=frames)
    assert len(parse(limits, FRAMES=frames[:3]).frames) == 3


# -- the gate --------------------------------------------------------------------------------------


def raw(id, **parameters):
    return RawRequest({}, parameters, id)


def test_places_are_given_back_whatever_comes_of_a_request():
    """As many as stated wait; each one that leaves, with an answer or an error, makes room."""
    gate, delivered = Gate(3, 3), []
    leave = [gate.enter(raw(n), delivered.append) for n in range(3)]
    with pytest.raises(Overloaded, match="3 requests are waiting"):
        gate.enter(raw(4), delivered.append)
    leave[0]("an answer")
    gate.enter(raw(4), delivered.append)(ValueError("an error"))
    assert delivered[0] == "an answer"
    assert isinstance(delivered[1], ValueError)
    gate.enter(raw(5), delivered.append)


def test_one_session_of_one_tenant_has_places_of_its_own():
    """The same id of another tenant is another session."""
    gate = Gate(10, 1)
    gate.enter(raw("s", tenant="a"), print)
    gate.enter(raw("s", tenant="b"), print)
    with pytest.raises(Overloaded, match="max_waiting_of_session"):
        gate.enter(raw("s", tenant="a"), print)


def test_a_canary_is_let_in_where_all_places_are_taken():
    """Full is not dead; but canaries are counted, too."""
    gate = Gate(1, 1)
    gate.enter(raw("s"), print)
    for n in range(16):
        gate.enter(raw(f"c{n}", canary=True), print)
    with pytest.raises(Overloaded, match="canaries"):
        gate.enter(raw("c", canary=True), print)


def test_many_threads_leave_as_many_places_as_there_were():
    """Nothing is lost between them."""
    gate = Gate(8, 8)

    def come_and_go(id):
        for _ in range(500):
            gate.enter(raw(id), lambda _: None)(None)

    threads = [threading.Thread(target=come_and_go, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in range(8):
        gate.enter(raw(n), print)
    with pytest.raises(Overloaded):
        gate.enter(raw(9), print)
