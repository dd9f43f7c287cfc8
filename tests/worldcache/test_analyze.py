"""Analysing what moves and matters, and the command on video files of several codecs and sizes."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from ctrlcache.errors import InvalidInput
from worldcache.analyze import AnalyzeConfig, analyze, chunked, grey, shrink
from worldcache.commands.analyze import command

CLIPS = Path(__file__).resolve().parents[2] / "client_examples" / "clips"
av = pytest.importorskip("av", reason="PyAV is not installed: pip install 'ctrlcache[analyze]'")


def scene(length=16, height=64, width=80, speed=1.0, seed=0):
    """Noise that stands still on the left half and a fine pattern that slides on the right."""
    draw = np.random.default_rng(seed)
    coarse = draw.integers(60, 190, (height // 8 + 1, width // 8 + 1))
    still = coarse.repeat(8, 0).repeat(8, 1)[:height, :width]
    y, x = np.mgrid[:height, :width]
    frames = []
    for t in range(length):
        moving = 128 + 90 * np.sin((x - speed * t) / 3) * np.cos(y / 4)
        frames.append(np.where(x < width // 2, still, moving))
    return np.stack(frames)[..., None].repeat(3, -1).round().astype(np.uint8)


def write(path, frames, codec, pixels="yuv420p"):
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], pixels
        for frame in frames:
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path


def test_motion_is_where_it_is_and_as_fast_as_it_is():
    """The sliding half moves by a pixel a frame, the other not at all."""
    result = analyze(scene())
    left, right = result.motion[:, :, :3], result.motion[:, :, 5:]
    assert left.max() < 0.02 / 80
    assert np.median(right) == pytest.approx(1 / 80, rel=0.3)
    assert result.dependency[:, :, :3].min() > 0.95 > result.dependency[:, :, 5:].mean()


def test_texture_is_energy():
    flat = np.full((8, 64, 64, 3), 120, np.uint8)
    assert analyze(flat).texture.max() == 0
    assert analyze(scene()).texture[:, :, 5:].min() > 5


def test_the_fast_analysis_ranks_as_the_full_one():
    """On a clip of a robot at work, which has corners and shadows that synthetic scenes lack."""
    pytest.importorskip("cv2", reason="OpenCV is not installed: pip install 'ctrlcache[analyze]'")
    from worldcache.analyze_full import analyze_full

    with np.load(CLIPS / "door-open.npz") as clip:
        frames = clip["frames"][:48]
    fast, full = analyze(frames), analyze_full(frames)
    ranks = [np.argsort(np.argsort(a.complexity.ravel())) for a in (fast, full)]
    assert np.corrcoef(*ranks)[0, 1] > 0.85
    assert fast.motion.shape == full.motion.shape == (6, 8, 8)


def test_frames_that_cannot_be_analysed_are_refused():
    with pytest.raises(InvalidInput, match="at least one frame"):
        analyze(np.zeros((0, 64, 64, 3), np.uint8))
    with pytest.raises(InvalidInput, match="too small"):
        analyze(np.zeros((3, 64, 9, 3), np.uint8))
    with pytest.raises(InvalidInput, match="frames must be"):
        grey(np.zeros((3, 64, 64, 4), np.uint8))
    with pytest.raises(ValueError, match="chunk"):
        AnalyzeConfig(chunk=0)


def test_regions_cover_every_pixel():
    """Means of regions, weighted by size, are the mean of the picture, whatever its size."""
    values = np.random.default_rng(0).uniform(size=(13, 29)).astype("f4")
    regions = chunked(values, (3, 5))
    rows, columns = (np.diff([n * i // k for i in range(k + 1)]) for k, n in ((3, 13), (5, 29)))
    assert (regions * np.outer(rows, columns)).sum() == pytest.approx(values.sum(), rel=1e-5)
    assert shrink(np.zeros((2, 500, 333, 3), np.uint8), 96).shape == (2, 83, 55)


FILES = [
    ("a.mp4", "libx264", "yuv420p", (64, 80)),
    ("b.avi", "mpeg4", "yuv420p", (48, 120)),
    ("c.webm", "libvpx-vp9", "yuv420p", (66, 98)),
    ("d.avi", "mjpeg", "yuvj420p", (160, 64)),
    ("e.mkv", "ffv1", "bgr0", (73, 111)),
]


@pytest.fixture
def run():
    import typer

    app = typer.Typer()
    app.command()(command)
    return lambda *arguments: CliRunner().invoke(app, [str(a) for a in arguments])


@pytest.mark.parametrize(("name", "codec", "pixels", "size"), FILES, ids=lambda x: str(x))
def test_any_codec_and_size_gives_a_table_and_a_picture(tmp_path, run, name, codec, pixels, size):
    path = write(tmp_path / name, scene(12, *size), codec, pixels)
    result = run(path)
    assert result.exit_code == 0, result.output
    assert f"{size[1]} x {size[0]}" in result.output
    picture = Image.open(tmp_path / f"{name}.heat.png")
    assert picture.size[0] > 100
    told = json.loads(run(path, "--json", "--grid", "4", "--output", tmp_path / "x.png").stdout)
    assert np.array(told["need"]).shape == (2, 4, 4)
    assert told["trouble"] == ""


def test_files_that_are_no_video_are_named(tmp_path, run):
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "text.mp4").write_text("no video " * 99)
    whole = write(tmp_path / "whole.mp4", scene(), "libx264").read_bytes()
    (tmp_path / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    for name, why in (("empty", "empty"), ("text", "no video"), ("cut", "cut off"), ("no", "not")):
        result = run(tmp_path / f"{name}.mp4")
        assert result.exit_code == 1
        assert f"{name}.mp4" in result.output.replace("\n", "")
        assert why in result.output.replace("\n", "")
        assert "Traceback" not in result.output


def test_a_file_that_is_cut_off_later_shows_its_beginning(tmp_path, run):
    whole = write(tmp_path / "whole.avi", scene(40, seed=3), "mjpeg", "yuvj420p").read_bytes()
    (tmp_path / "cut.avi").write_bytes(whole[: len(whole) // 2])
    result = run(tmp_path / "cut.avi")
    assert result.exit_code == 1
    assert "this is only its beginning" in result.output.replace("\n", " ")
    assert (tmp_path / "cut.avi.heat.png").exists()
