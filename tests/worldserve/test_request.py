"""The wire contract: what is valid becomes a Request, all else is refused with a helpful text."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from ctrlcache.errors import InvalidInput
from worldserve.images import decode_frames, resize_frames
from worldserve.models.tiny import TinyWorldModel
from worldserve.request import OUTPUTS, RawRequest, RequestLimits, parse_request

SPEC = TinyWorldModel().spec
LIMITS = RequestLimits(max_frames=8, max_samples=64, max_pixels=100_000)


def image_bytes(width=40, height=30, kind="PNG", mode="RGB", seed=0):
    size = (height, width) if mode == "L" else (height, width, len(mode))
    pixels = np.random.default_rng(seed).integers(0, 256, size, np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels, mode).save(file, kind)
    return file.getvalue()


def raw(inputs=None, parameters=None, **flags):
    given_inputs = {"CONTROL": np.zeros((1, 2), np.float32), **(inputs or {})}
    given_inputs = {name: array for name, array in given_inputs.items() if array is not None}
    return RawRequest(given_inputs, parameters or {}, correlation_id="s", **flags)


def parse(*args, **kwargs):
    return parse_request(raw(*args, **kwargs), SPEC, LIMITS)


def encoded(*images):
    return np.array(images, np.object_)


def test_defaults():
    """A control alone is a probe of the default horizon, with the cache on."""
    request = parse()
    assert (request.mode, request.cache, request.horizon, request.seed) == ("probe", "on", 8, 0)
    assert request.max_error is None
    assert request.tenant == ""
    assert len(request.frames) == 0
    assert request.outputs == frozenset(OUTPUTS)


def test_everything_at_once():
    """All inputs and parameters arrive where they belong."""
    request = parse(
        {
            "CONTROL": np.ones((3, 2), np.float32),
            "CONTROL_TIMES": np.array([0.0, 0.1, 0.2]),
            "FRAMES": np.zeros((2, 64, 64, 3), np.uint8),
            "FRAME_TIMES": np.array([0.0, 0.1]),
            "HORIZON": np.array([5], np.int32),
        },
        {
            "mode": "advance",
            "max_error": 0.1,
            "cache": "refresh",
            "prompt": "push",
            "view": "top",
            "seed": 7,
            "tenant": "a",
            "device": "pad",
        },
        start=True,
        end=True,
    )
    assert request.frames.shape == (2, 32, 32, 3)
    assert request.samples.shape == (3, 2)
    assert (request.horizon, request.mode, request.cache) == (5, "advance", "refresh")
    assert (request.prompt, request.view, request.tenant) == ("push", "top", "a")
    assert (request.seed, request.device, request.max_error) == (7, "pad", 0.1)
    assert request.start
    assert request.end


@pytest.mark.parametrize("value", ["0.1", "0", 0, 1])
def test_numbers_may_come_as_text(value):
    """Clients that cannot send a float send a text of one."""
    assert parse(parameters={"max_error": value}).max_error == float(value)


INVALID = {
    "no control": ({"CONTROL": None}, {}, "CONTROL is required"),
    "control width": ({"CONTROL": np.zeros((1, 3), np.float32)}, {}, r"\[K, 2\].*\[1, 3\]"),
    "control rank": ({"CONTROL": np.zeros(2, np.float32)}, {}, r"CONTROL.*\[2\]"),
    "control empty": ({"CONTROL": np.zeros((0, 2), np.float32)}, {}, r"CONTROL.*\[0, 2\]"),
    "control too long": ({"CONTROL": np.zeros((65, 2), np.float32)}, {}, "64"),
    "control dtype": ({"CONTROL": np.zeros((1, 2), np.float64)}, {}, "float32, got float64"),
    "control nan": ({"CONTROL": np.array([[0, np.nan]], np.float32)}, {}, r"nan in \[0, 1\]"),
    "control inf": ({"CONTROL": np.array([[np.inf, 0]], np.float32)}, {}, r"inf in \[0, 0\]"),
    "control times length": ({"CONTROL_TIMES": np.zeros(2)}, {}, r"CONTROL_TIMES.*\[1\].*\[2\]"),
    "control times nan": ({"CONTROL_TIMES": np.array([np.nan])}, {}, "CONTROL_TIMES.*nan"),
    "frame times without frames": ({"FRAME_TIMES": np.zeros(1)}, {}, "FRAME_TIMES"),
    "frames channels": ({"FRAMES": np.zeros((1, 8, 8, 4), np.uint8)}, {}, r"\[1, 8, 8, 4\]"),
    "frames rank": ({"FRAMES": np.zeros((8, 8, 3), np.uint8)}, {}, r"\[8, 8, 3\]"),
    "frames empty": ({"FRAMES": np.zeros((0, 8, 8, 3), np.uint8)}, {}, r"\[0, 8, 8, 3\]"),
    "frames too many": ({"FRAMES": np.zeros((9, 8, 8, 3), np.uint8)}, {}, "at most 8"),
    "frames too large": ({"FRAMES": np.zeros((1, 400, 400, 3), np.uint8)}, {}, "400 x 400"),
    "frames dtype": ({"FRAMES": np.zeros((1, 8, 8, 3), np.float32)}, {}, "uint8, got float32"),
    "frames twice": (
        {"FRAMES": np.zeros((1, 8, 8, 3), np.uint8), "FRAMES_ENCODED": encoded(image_bytes())},
        {},
        "exclude each other",
    ),
    "not an image": ({"FRAMES_ENCODED": encoded(b"hello")}, {}, r"FRAMES_ENCODED\[0\].*5 bytes"),
    "empty image": ({"FRAMES_ENCODED": encoded(b"")}, {}, r"FRAMES_ENCODED\[0\].*0 bytes"),
    "half an image": (
        {"FRAMES_ENCODED": encoded(image_bytes(), image_bytes()[:200])},
        {},
        r"FRAMES_ENCODED\[1\]",
    ),
    "a gif": ({"FRAMES_ENCODED": encoded(image_bytes(kind="GIF"))}, {}, "JPEG or PNG"),
    "image bomb": ({"FRAMES_ENCODED": encoded(image_bytes(400, 400))}, {}, "400 x 400"),
    "horizon 0": ({"HORIZON": np.array([0], np.int32)}, {}, "1 to 12, got 0"),
    "horizon 13": ({"HORIZON": np.array([13], np.int32)}, {}, "1 to 12, got 13"),
    "horizon shape": ({"HORIZON": np.array([1, 2], np.int32)}, {}, r"HORIZON.*\[2\]"),
    "unknown input": ({"FRAME": np.zeros(1)}, {}, "'FRAME' is not known"),
    "unknown mode": ({}, {"mode": "jump"}, "probe, advance, seek, got 'jump'"),
    "unknown cache": ({}, {"cache": "maybe"}, "on, off, refresh, got 'maybe'"),
    "cache true": ({}, {"cache": True}, "got True"),
    "unknown parameter": ({}, {"max_eror": 0.1}, "'max_eror' is not known"),
    "negative error": ({}, {"max_error": -0.1}, "at least 0, got -0.1"),
    "nan error": ({}, {"max_error": float("nan")}, "got nan"),
    "error text": ({}, {"max_error": "little"}, "got 'little'"),
    "error bool": ({}, {"max_error": True}, "got True"),
    "seek without frame": ({}, {"mode": "seek"}, "'frame'"),
    "frame without seek": ({}, {"frame": 1}, "'frame'"),
    "frame negative": ({}, {"mode": "seek", "frame": -1}, "from 0 to"),
    "frame text": ({}, {"mode": "seek", "frame": "x"}, "whole number"),
    "seed float": ({}, {"seed": 1.5}, "whole number.*1.5"),
    "seed negative": ({}, {"seed": -1}, "got -1"),
    "resume without start": ({}, {"resume": "a"}, "START"),
    "fork without start": ({}, {"fork_of": 3}, "START"),
    "prompt number": ({}, {"prompt": 3}, "text.*got 3"),
    "prompt too long": ({}, {"prompt": "x" * 3000}, "2000"),
    "prompt surrogate": ({}, {"prompt": "\ud800"}, "text"),
    "tenant nul": ({}, {"tenant": "a\0b"}, "text"),
    "drain": ({}, {"drain": "perhaps"}, "true or false"),
}


@pytest.mark.parametrize("case", INVALID)
def test_invalid(case):
    """Each refusal names the input, what was expected and what came."""
    inputs, parameters, text = INVALID[case]
    with pytest.raises(InvalidInput, match=text):
        parse(inputs, parameters)


def test_start_needs_frames():
    """A session cannot begin without having seen anything."""
    with pytest.raises(InvalidInput, match="FRAMES or FRAMES_ENCODED"):
        parse(start=True)
    for name in ("resume", "fork_of"):
        assert getattr(parse(parameters={name: "other"}, start=True), name) == "other"
    with pytest.raises(InvalidInput, match="exclude each other"):
        parse(parameters={"resume": "a", "fork_of": "b"}, start=True)


@pytest.mark.parametrize("value", ["", 0, True, 1.5, "x" * 200, None.__class__])
def test_session_ids(value):
    """A session's id is a number or a text, and neither 0 nor empty."""
    with pytest.raises(InvalidInput, match="'resume'"):
        parse(parameters={"resume": value}, start=True)


def test_reserved_parameters_are_the_servers():
    """What Triton adds to a request is not the caller's mistake."""
    assert parse(parameters={"triton_enable_empty_final_response": True}).mode == "probe"


@given(
    st.dictionaries(
        st.sampled_from(["mode", "cache", "seed", "frame", "max_error", "prompt", "resume", "x"]),
        st.one_of(st.text(max_size=5), st.integers(), st.floats(), st.booleans()),
    ),
    st.booleans(),
)
def test_parameters_never_fail_otherwise(parameters, start):
    """Whatever the parameters, the outcome is a Request or an InvalidInput."""
    try:
        outcome = parse(parameters=parameters, start=start).mode
    except InvalidInput as error:
        outcome = str(error)
    assert outcome in ("probe", "advance", "seek") or len(outcome) > 20


# --- images ---------------------------------------------------------------------------------------


@given(
    st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(1, 7), st.integers(0, 99)
)
def test_whole_ratios_are_exact_averages(frames, down, across, size, seed):
    """Each pixel is the rounded mean of its box."""
    shape = (frames, size * down, size * across, 3)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    mean = pixels.reshape(frames, size, down, size, across, 3).mean((2, 4))
    resized = resize_frames(pixels, (size, size))
    assert resized.shape == (frames, size, size, 3)
    assert np.abs(resized.astype(float) - mean).max() <= 0.5 + 1e-6


def test_other_ratios_average_by_area():
    """A ratio that is no whole number weighs the pixels at the edges by their share."""
    step = np.repeat(np.array([0, 90, 180], np.uint8), 3)  # 9 wide, in three bands
    image = np.broadcast_to(step[None, None, :, None], (1, 9, 9, 3))
    resized = resize_frames(np.ascontiguousarray(image), (2, 2))
    # The left half covers 3 columns of 0 and 1.5 of 90.
    assert resized[0, 0, :, 0].tolist() == [30, 150]


def test_same_size_is_a_copy():
    """The caller's memory may go away."""
    frames = np.zeros((1, 32, 32, 3), np.uint8)
    assert not np.shares_memory(resize_frames(frames, (32, 32)), frames)


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_images_come_out_as_they_went_in(kind):
    """A smooth picture survives, whatever its format."""
    y, x = np.mgrid[:64, :64]
    smooth = np.stack([x * 4, y * 4, (x + y) * 2], -1).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(smooth).save(file, kind, **({"quality": 95} if kind == "JPEG" else {}))
    decoded = decode_frames([file.getvalue()], (64, 64))
    assert np.abs(decoded[0].astype(int) - smooth).max() <= (0 if kind == "PNG" else 12)


@pytest.mark.parametrize("mode", ["L", "RGBA"])
def test_grey_and_transparent_images_become_rgb(mode):
    """Three channels, whatever the picture has."""
    assert decode_frames([image_bytes(mode=mode)], (8, 8)).shape == (1, 8, 8, 3)


def test_a_large_jpeg_is_decoded_small():
    """A 4K JPEG comes out close to the average of its pixels."""
    y, x = np.mgrid[:2160, :3840]
    picture = np.stack([x // 16, y // 9, np.full_like(x, 77)], -1).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=90)
    decoded = decode_frames([file.getvalue()], (64, 64))[0]
    exact = resize_frames(picture[None], (64, 64))[0]
    assert np.abs(decoded.astype(int) - exact).mean() < 2
