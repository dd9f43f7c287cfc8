"""Show it all: a real server, three real clips, a person who plays with them.

    python -m worldserve.demo            # KEEP=1 leaves the server running

Starts the server with its object store, plays a scripted session on each shipped clip with the
cache on, the same one at the same pace on a second session with cache=off, and compares: latency,
tiers, errors of approximate answers, and whether both remember the same. Pictures go to `demo/`.
The exit status is 0 only where nothing was wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.live import Live

from ctrlcache.errors import ConfigError, CtrlCacheError
from worldserve.demo_chart import chart
from worldserve.demo_checks import Played, Step, summarise
from worldserve.demo_client import Session
from worldserve.demo_pictures import film, sheet
from worldserve.demo_report import interaction_table, print_summary
from worldserve.demo_script import Interaction, Scene, load_scene, script
from worldserve.runtime import Runtime, RuntimeConfig
from worldserve.sequence_client import Reply
from worldserve.settings import default_instances, free_ports

__all__ = ["main", "play"]

#: Clips and the last frame shown to the model: right before something is moved.
PRESENTS = {"door-open": 15, "drawer-open": 31, "coffee-pull": 15}
_PORTS = (8000, 8001, 8002)


def play(client: Any, scene: Scene, pause_s: float, max_error: float, console: Console) -> Played:
    """Play a scene on both sessions; the table grows meanwhile."""
    interactions = script(scene)
    cached: list[Reply] = []
    plain: list[Reply] = []
    # The last question asks for what each session remembers, past any cache.
    question = Interaction("question", scene.controls[scene.present :][:1])
    with Live(console=console, auto_refresh=False) as live:

        def run(answers: list[Reply], **parameters: Any) -> Reply:
            session = Session(client, scene.prompt, **parameters)
            for interaction in interactions:
                answers.append(session.ask(interaction))
                title = f"{scene.name}: {scene.prompt}"
                table = interaction_table(title, interactions, cached, plain, console.width)
                live.update(table, refresh=True)
                time.sleep(pause_s)
            return session.ask(question, end=True, cache="off")

        last = (run(cached, max_error=max_error), run(plain, cache="off"))
    second = Session(client, scene.prompt, max_error=max_error).ask(interactions[0], end=True)
    steps = [Step(*row) for row in zip(interactions, cached, plain, strict=True)]
    return Played(scene, steps, last, second)


def state_scale(repository: Path) -> NDArray[np.float32]:
    """(S,) in which state errors are measured, from the reference model's configuration."""
    raw = json.loads((repository / "world_model" / "1" / "config.json").read_text())
    return np.asarray(raw["statistics"]["state_scale"], np.float32)


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    console = Console(highlight=False)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        with _runtime(options.repository, console) as runtime:
            status = _demo(runtime, options, console)
            if options.keep:
                _keep(runtime, console)
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    except CtrlCacheError as error:
        console.print(f"[red]the demo could not start:[/] {error}", markup=True)
        return 1
    return status


def _demo(runtime: Runtime, options: argparse.Namespace, console: Console) -> int:
    import tritonclient.grpc as grpcclient

    scale = state_scale(options.repository)
    options.out.mkdir(parents=True, exist_ok=True)
    played = []
    try:
        with grpcclient.InferenceServerClient(runtime.endpoints.grpc) as client:
            for name in options.only or PRESENTS:
                scene = load_scene(options.clips / f"{name}.npz", PRESENTS[name])
                played.append(play(client, scene, options.pause, options.max_error, console))
                console.print()
    except grpcclient.InferenceServerException as error:
        console.print(f"[red]the server refused or failed:[/] {error}\n{runtime.log_tail()}")
        return 1
    summary = summarise(played, scale)
    print_summary(console, summary, played, options.pause, options.max_error)
    for scene_played in played:
        name = scene_played.scene.name
        sheet(scene_played, options.out / f"{name}.png")
        film(scene_played, options.out / f"{name}.gif")
    chart(played, summary, options.out / "latency.png")
    console.print(f"\npictures: {options.out}/*.png, {options.out}/*.gif")
    for fault in summary.faults:
        console.print(f"[red]wrong:[/] {fault}")
    return 1 if summary.faults else 0


def _runtime(repository: Path, console: Console) -> Runtime:
    config = RuntimeConfig(model_repository=repository, instances=default_instances())
    try:
        free_ports(tuple(config.servers), _PORTS)
    except ConfigError:
        config = replace(config, http_port=0, grpc_port=0, metrics_port=0)
    runtime = Runtime(config, log=console.print)
    console.print("starting tritonserver and the object store ...")
    return runtime


def _keep(runtime: Runtime, console: Console) -> None:
    console.print(
        "\nthe server goes on; Ctrl-C here ends it. Meanwhile, in another terminal:\n\n"
        f"    python client_examples/keyboard.py --url {runtime.endpoints.grpc}\n"
    )
    with contextlib.suppress(KeyboardInterrupt):
        signal.pause()


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="worldserve.demo", description=__doc__.splitlines()[0])
    parser.add_argument("--repository", type=Path, default=Path("model_repository"))
    parser.add_argument("--clips", type=Path, default=Path("client_examples/clips"))
    parser.add_argument("--only", action="append", choices=PRESENTS, help="this clip alone")
    parser.add_argument("--out", type=Path, default=Path("demo"))
    parser.add_argument("--pause", type=float, default=0.3, help="thinking time, seconds")
    parser.add_argument(
        "--max-error", type=float, default=0.05, help="relative state error that is allowed"
    )
    parser.add_argument(
        "--keep",
        action="store_true",
        default=os.environ.get("KEEP", "") not in ("", "0"),
        help="leave the server running (also: KEEP=1)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
