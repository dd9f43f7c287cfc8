"""`ctrlcache warm-report`: how long the first answer takes after a restart, warmed up or not."""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from worldserve.demo_script import HORIZON, Interaction

__all__ = ["warm_report"]

_MODEL = "world_model"
_SEEN = 32
_COLD = {"prefetch_strategy": "none", "warmup_steps": "0"}


@dataclass(frozen=True, eq=False)
class _Scene:
    """A clip, and its first question: as it was asked before, and another one."""

    name: str
    prompt: str
    frames: Any
    controls: Any

    def first(self, other: bool) -> Interaction:
        samples = self.controls[:_SEEN].copy()
        if other:
            samples[-1, :3] = -0.5 * samples[-1, :3] + 0.1
        return Interaction("first", samples, frames=self.frames[:_SEEN])


def warm_report(
    clips: Annotated[
        Path, typer.Option(help="Folder of .npz files with frames, controls and prompt.")
    ] = Path("client_examples/clips"),
    model_repository: Annotated[Path, typer.Option(help="Model repository.")] = Path(
        "model_repository"
    ),
    rounds: Annotated[int, typer.Option(min=1, help="Restarts of each kind.")] = 2,
    out: Annotated[Path | None, typer.Option(help="Also write all numbers here, as JSON.")] = None,
) -> None:
    """Start a real server, show it the clips, and restart it again and again: the time from the
    first request of a session to its first frames, without a warm-up and with one (told the prompt
    in other words). What was cached on disk is the same for both."""
    from rich.console import Console
    from rich.table import Table

    from worldserve.bench.report import machine

    scenes = [_load(path) for path in sorted(clips.glob("*.npz"))]
    if not scenes:
        raise typer.BadParameter(f"no .npz files in {clips}", param_hint="--clips")
    with tempfile.TemporaryDirectory(prefix="warm-report-") as scratch:
        found = _measure(scenes, model_repository.resolve(), rounds, Path(scratch))
    table = Table("first question", "without, ms", "warmed up, ms", "less", "prepared in, s")
    report: dict[str, Any] = {}
    for question, times in found.items():
        cold, warm = (statistics.median(times[kind]) for kind in ("without", "with"))
        prepared_s = statistics.median(times["prepared_s"])
        report[question] = {**times, "less": 1 - warm / cold}
        table.add_row(
            question, f"{cold:.0f}", f"{warm:.0f}", f"{1 - warm / cold:.0%}", f"{prepared_s:.1f}"
        )
    Console().print(table)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        about = {"machine": machine(), "clips": [scene.name for scene in scenes]}
        out.write_text(json.dumps({**about, "cold_start": report}, indent=1) + "\n")


def _load(path: Path) -> _Scene:
    with np.load(path) as clip:
        controls = clip["controls"].astype(np.float32)
        return _Scene(path.stem, str(clip["prompt"]), clip["frames"], controls)


def _measure(
    scenes: list[_Scene], repository: Path, rounds: int, scratch: Path
) -> dict[str, dict[str, list[float]]]:
    """By question: milliseconds without and with a warm-up, and how long that took."""
    from rich.progress import Progress

    questions = {"another one than before": True, "the same as before": False}
    found: dict[str, dict[str, list[float]]] = {
        question: {"without": [], "with": [], "prepared_s": []} for question in questions
    }
    with Progress() as progress:
        task = progress.add_task("servers", total=1 + 2 * rounds * len(questions))
        kept = scratch / "kept"
        with _server(repository, kept / "warm", {}) as url:
            for scene in scenes:
                _first_frames(url, scene, scene.first(other=False))
        progress.advance(task)
        for _ in range(rounds):
            for question, other in questions.items():
                times = found[question]
                for kind in ("without", "with"):
                    place = scratch / "used"
                    shutil.copytree(kept, place)
                    settings = _COLD if kind == "without" else {}
                    with _server(repository, place / "warm", settings) as url:
                        if kind == "with":
                            times["prepared_s"].append(_warm_up(url, scenes))
                        for scene in scenes:
                            times[kind].append(_first_frames(url, scene, scene.first(other)))
                    shutil.rmtree(place)
                    progress.advance(task)
    return found


class _server:
    """A server of its own; its gRPC address."""

    def __init__(self, repository: Path, warm_dir: Path, settings: dict[str, str]) -> None:
        from worldserve.runtime import Runtime, RuntimeConfig

        warm_dir.parent.mkdir(parents=True, exist_ok=True)
        self._runtime = Runtime(
            RuntimeConfig.aside(
                repository,
                warm_dir=warm_dir,
                instances=1,
                ready_timeout_s=600.0,
                parameters=settings,
            )
        )

    def __enter__(self) -> str:
        self._runtime.start()
        return str(self._runtime.endpoints.grpc)

    def __exit__(self, *error: object) -> None:
        self._runtime.stop()


def _first_frames(url: str, scene: _Scene, question: Interaction) -> float:
    """Milliseconds from the first request of a session to its frames; then all else it causes."""
    import tritonclient.grpc as triton

    from worldserve.demo_client import Session

    with triton.InferenceServerClient(url) as client:
        session = Session(client, scene.prompt)
        took_ms = session.ask(question).latency_ms
        again = Interaction("again", question.samples[-1:])
        session.ask(again, end=True, drain=True)
    return took_ms


def _warm_up(url: str, scenes: list[_Scene]) -> float:
    """Announce all prompts in other words; seconds until all is ready."""
    import tritonclient.grpc as triton

    from worldserve.sequence_client import tensor

    began = time.perf_counter()
    with triton.InferenceServerClient(url) as client:
        for scene in scenes:
            control = np.zeros((1, scene.controls.shape[1]), np.float32)
            client.infer(
                _MODEL,
                [tensor("CONTROL", control), tensor("HORIZON", np.array([HORIZON], np.int32))],
                outputs=[triton.InferRequestedOutput("CONFIDENCE")],
                sequence_id=f"warm-up-{scene.name}",
                sequence_start=True,
                sequence_end=True,
                parameters={"mode": "warm", "prompt": f"please {scene.prompt}"},
            )
    return time.perf_counter() - began
