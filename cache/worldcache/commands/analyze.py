"""`ctrlcache analyze FILE`: what in a video moves and matters, as a table and a picture."""

from __future__ import annotations

import importlib
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from rich.console import Console
from rich.table import Table

from ctrlcache.commands.common import Json, failing_clearly
from ctrlcache.errors import InvalidInput
from worldcache.analyze import Analysis, AnalyzeConfig, analyze
from worldcache.analyze_full import analyze_full
from worldcache.video import Video, read_video
from worldcache.weights import WeightSettings, colours, settled

__all__ = ["command", "heat_map", "model_semantics", "summary"]

_MOST_SHOWN = 8
_SIDE = 320
_SEMANTICS = "worldserve.models.semantics:load"


def command(
    file: Annotated[Path, typer.Argument(help="Any video that FFmpeg reads.")],
    full: Annotated[bool, typer.Option(help="Dense flow and full DCT: thorough and slow.")] = False,
    output: Annotated[
        Path | None, typer.Option(help="The picture [default: FILE.heat.png].")
    ] = None,
    chunk: Annotated[int, typer.Option(help="Frames judged together.")] = 8,
    grid: Annotated[int, typer.Option(help="Regions along each side.")] = 8,
    semantics: Annotated[float, typer.Option(help="Weight of what matters, 0 to 1.")] = 0.3,
    window: Annotated[int, typer.Option(help="Chunks over which importance is carried on.")] = 2,
    weights: Annotated[
        Path | None, typer.Option(help="A world model whose attention says what matters.")
    ] = None,
    clip: Annotated[
        Path | None, typer.Option(help="Directory of a CLIP model that says what matters.")
    ] = None,
    loader: Annotated[str, typer.Option(help="What reads the weights: module:name.")] = _SEMANTICS,
    most_frames: Annotated[int, typer.Option(help="Longer videos are thinned out.")] = 512,
    as_json: Json = False,
) -> None:
    """Analyse a video for reuse: motion, texture, importance and likeness, by region and chunk."""
    with failing_clearly():
        try:
            config = AnalyzeConfig(grid=(grid, grid), chunk=chunk)
            settings = WeightSettings(semantics=semantics, window=window)
        except ValueError as error:
            raise InvalidInput(str(error)) from None
        video = read_video(file, most_frames)
        matters = model_semantics(video, config, weights, clip, loader)
        began = time.perf_counter()
        result = (analyze_full if full else analyze)(video.frames, config, matters)
        took_ms = (time.perf_counter() - began) * 1e3
        path = output or file.with_name(f"{file.name}.heat.png")
        need = settled(result.importance(settings.semantics), settings.window)
        heat_map(video.frames, need, config.chunk).save(path)
        if as_json:
            typer.echo(json.dumps(_as_json(video, result, need, took_ms, path)))
        console = Console()
        if not as_json:
            console.print(summary(video, result, need))
            console.print(f"analysed in {took_ms:.0f} ms; picture: {path}", soft_wrap=True)
        if video.trouble:
            raise InvalidInput(f"{file} is cut off, this is only its beginning: {video.trouble}")


def model_semantics(
    video: Video, config: AnalyzeConfig, weights: Path | None, clip: Path | None, loader: str
) -> NDArray[np.float32] | None:
    """Importance (C, R, K) by a model, of the middle frame of every chunk; None without a model."""
    if weights is None and clip is None:
        return None
    if weights is not None and clip is not None:
        raise InvalidInput("--weights and --clip exclude each other, got both")
    if clip is not None:
        loader = "worldcache.clip:load"
    module, _, name = loader.partition(":")
    path = weights or clip
    try:
        saliency: Any = getattr(importlib.import_module(module), name)(path)
    except (ImportError, AttributeError, OSError, ValueError, KeyError) as error:
        raise InvalidInput(f"{path} cannot be used by {loader}: {error}") from error
    first = np.arange(0, len(video.frames), config.chunk)
    middles = np.minimum(first + config.chunk // 2, len(video.frames) - 1)
    maps: NDArray[np.float32] = saliency(video.frames[middles], config.grid)
    return maps


def summary(video: Video, result: Analysis, need: NDArray[np.float32]) -> Table:
    """One row for each chunk; of very many, evenly spread ones."""
    width, height = video.size
    table = Table(
        title=f"{len(video.frames)} frames, {width} x {height}, {video.codec}, {video.fps:.3g} fps",
        title_justify="left",
    )
    for name in ("frames", "motion, px/frame", "texture", "semantics", "alike", "need", "busiest"):
        table.add_column(name, justify="right")
    chunks = len(result.first)
    side = max(video.size)
    for chunk in np.unique(np.linspace(0, chunks - 1, min(chunks, 32)).round().astype(int)):
        start = int(result.first[chunk]) * video.every
        end = (result.first[chunk + 1] if chunk + 1 < chunks else len(video.frames)) * video.every
        row, column = np.unravel_index(need[chunk].argmax(), need[chunk].shape)
        table.add_row(
            f"{start}-{end - 1}",
            f"{result.motion[chunk].mean() * side / video.every:.2f}",
            f"{result.texture[chunk].mean():.1f}",
            f"{result.semantics[chunk].mean():.2f}",
            f"{result.dependency[chunk].mean():.2f}",
            f"{need[chunk].mean():.2f}",
            f"{row}, {column}",
        )
    return table


def heat_map(frames: NDArray[np.uint8], need: NDArray[np.float32], chunk: int) -> Image.Image:
    """Frames of up to eight chunks: as they are above, and below them with their regions' need."""
    shown = np.unique(
        np.linspace(0, len(need) - 1, min(len(need), _MOST_SHOWN)).round().astype(int)
    )
    height, width = frames.shape[1:3]
    scale = _SIDE / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    sheet = Image.new("RGB", (len(shown) * (size[0] + 4), 2 * size[1] + 24), "white")
    draw = ImageDraw.Draw(sheet)
    for place, index in enumerate(shown):
        at = min(int(index) * chunk + chunk // 2, len(frames) - 1)
        picture = Image.fromarray(frames[at]).resize(size, Image.Resampling.LANCZOS)
        heat = Image.fromarray(colours(need[index])).resize(size, Image.Resampling.BICUBIC)
        left = place * (size[0] + 4)
        sheet.paste(picture, (left, 0))
        sheet.paste(Image.blend(picture, heat, 0.55), (left, size[1] + 4))
        draw.text((left, 2 * size[1] + 8), f"frame {at}: need {need[index].mean():.2f}", "black")
    return sheet


def _as_json(
    video: Video, result: Analysis, need: NDArray[np.float32], took_ms: float, path: Path
) -> dict[str, Any]:
    maps = {
        name: np.round(values.astype(float), 5).tolist()
        for name, values in {**asdict(result), "need": need}.items()
    }
    about = {"frames": len(video.frames), "size": video.size, "codec": video.codec}
    return {
        **about,
        "fps": video.fps,
        "every": video.every,
        "trouble": video.trouble,
        "took_ms": took_ms,
        "picture": str(path),
        **maps,
    }
