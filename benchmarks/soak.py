"""Thirty minutes of sixteen people at work: what grows, and does the answer's time stay the same?

    python benchmarks/soak.py [--minutes 30] [--sessions 16] [--instances 1]
                              [--control-trace FILE ...] [--json FILE] [--picture FILE]

Real weights, the supervisor and an object store, as `ctrlcache up` starts them. Each person has a
session of its own, begins it, and works at a human's pace: recordings of real hands where given
(`--control-trace`; docs/evaluation says where the data set is found), otherwise drawn pauses and
corrections. One in ten sessions ends and begins anew every few minutes. Noted every five seconds,
over all processes of the run: memory that is theirs alone, bytes in shared memory, open files; and,
of every request, its latency. The hot tier is kept small, so that its limit is reached early.
`--minutes 2` is a short run.

Flat means: from the second third to the last, the median of each may differ by no more than stated.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from worldserve import processes
from worldserve.bench.hands import hand_actions, read_recording
from worldserve.bench.report import machine
from worldserve.bench.workload import Action, Clip, Habits, act
from worldserve.runtime import Runtime, RuntimeConfig
from worldserve.supervisor import GaveUp, Lost, Recovered, Supervisor, SupervisorEvent

PROJECT = Path(__file__).resolve().parent.parent
OUTPUTS = ("STATE", "PREDICTED_FRAMES", "CACHE_TIER", "EXACT")
SAMPLE_S = 5.0
#: What may change between the second and the last third of the run, of its median.
FLAT = {"memory_mb": 0.05, "shm_mb": 0.10, "files": 0.05, "p50_ms": 0.35, "p99_ms": 0.60}


def scene(number: int, length: int = 120) -> Clip:
    """A smooth synthetic clip; every third one is shared by several people."""
    draw = np.random.default_rng(number)
    y, x = np.mgrid[:64, :64] / 64
    phase, speed = draw.uniform(0, 6, 3), draw.uniform(0.02, 0.08)
    frames = [
        np.stack([128 + 90 * np.sin(5 * x + 3 * y + p + speed * t) for p in phase], -1)
        for t in range(length)
    ]
    return Clip(
        name=f"scene-{number}",
        suite="soak",
        operation="",
        prompt="",
        frames=np.stack(frames).round().astype(np.uint8),
        controls=draw.uniform(-0.5, 0.5, (length - 1, 4)).astype(np.float32),
        physics=np.zeros((length, 1), np.float32),
    )


def habits_of(clip: Clip, traces: Sequence[Path], number: int, of: int) -> list[Action]:
    """What this person does, over and over: a stretch of a recording, or drawn."""
    if not traces:
        return act(clip, Habits(asks=400), user=number)
    recording = read_recording(traces[number % len(traces)])
    share = -(-of // len(traces))
    part = recording.part(number // len(traces) % share, share)
    return hand_actions(clip, Habits(asks=100_000, lead=4), part)


class Person(threading.Thread):
    """One session after the other. `latencies`: (when, ms, "exact hit", "near" or "computed")."""

    def __init__(
        self, url: str, number: int, of: int, traces: Sequence[Path], stop: threading.Event
    ) -> None:
        super().__init__(name=f"person-{number}", daemon=True)
        self.latencies: list[tuple[float, float, str]] = []
        self.refused: list[str] = []
        self._client = triton.InferenceServerClient(url)
        self._clip = scene(number // 3)
        self._actions = habits_of(self._clip, traces, number, of)
        self._draw = np.random.default_rng(number)
        self._sessions = itertools.count()
        self._restarts = number % 10 == 0
        self._number, self._halt = number, stop

    def run(self) -> None:
        self._halt.wait(float(self._draw.uniform(0, 3)))
        actions = itertools.cycle(self._actions)
        while not self._halt.is_set():
            self._session(actions, 180.0 if self._restarts else float("inf"))
        self._client.close()

    def _session(self, actions: Iterator[Action], lasts_s: float) -> None:
        id = f"soak-{self._number}-{next(self._sessions)}"
        frames, shown = self._clip.frames, 4
        self._ask(id, np.zeros((1, 4), np.float32), frames[:shown], sequence_start=True)
        ends = time.monotonic() + lasts_s
        for action in actions:
            if self._halt.is_set() or time.monotonic() > ends:
                break
            control = np.asarray(action.control, np.float32)[None]
            if action.mode == "watch":
                self._ask(id, np.vstack([control, control]), frames[shown % 120][None])
                shown += 1
            else:
                mode = "advance" if action.mode == "advance" else "probe"
                self._ask(id, control, parameters={"mode": mode})
            self._halt.wait(action.pause_s)
        self._ask(id, np.zeros((1, 4), np.float32), sequence_end=True)

    def _ask(self, id: str, control: Any, frames: Any = None, **options: Any) -> None:
        inputs = []
        for name, array in (("CONTROL", control), ("FRAMES", frames)):
            if array is not None:
                kind = "UINT8" if array.dtype == np.uint8 else "FP32"
                inputs.append(triton.InferInput(name, list(array.shape), kind))
                inputs[-1].set_data_from_numpy(array)
        wanted = [triton.InferRequestedOutput(name) for name in OUTPUTS]
        began = time.monotonic()
        try:
            got = self._client.infer(
                "world_model", inputs, outputs=wanted, sequence_id=id, client_timeout=60, **options
            )
        except triton.InferenceServerException as error:
            self.refused.append(str(error))
            return
        took_ms = (time.monotonic() - began) * 1e3
        computed = got.as_numpy("CACHE_TIER")[0] == b"none"
        near = not got.as_numpy("EXACT")[0]
        self.latencies.append(
            (began, took_ms, "near" if near else "computed" if computed else "hit")
        )


class Watch:
    """Looks at all processes of the run, every few seconds."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.samples: list[dict[str, float]] = []

    def look(self) -> None:
        sample = {"at_s": time.monotonic(), "memory_mb": 0.0, "files": 0.0, "processes": 0.0}
        for process in processes.run_processes(self._runtime.run_id):
            try:
                status = Path(f"/proc/{process.pid}/status").read_text()
                files = len(os.listdir(f"/proc/{process.pid}/fd"))
            except OSError:
                continue
            private = int(status.split("RssAnon:")[1].split()[0]) / 1024
            name = _name(process.command)
            sample["memory_mb"] += private
            sample["files"] += files
            sample["processes"] += 1
            sample[f"memory_mb/{name}"] = sample.get(f"memory_mb/{name}", 0.0) + private
            sample[f"files/{name}"] = sample.get(f"files/{name}", 0.0) + files
        blocks = 0
        for top in processes.shm_entries(self._runtime.run_id, self._runtime.config.shm):
            for path in top.rglob("*") if top.is_dir() else [top]:
                try:
                    blocks += path.stat().st_blocks
                except OSError:
                    continue
        sample["shm_mb"] = blocks * 512 / 2**20
        self.samples.append(sample)


def _name(command: Sequence[str]) -> str:
    """What a process is, for the tables."""
    program = Path(command[0]).name if command else "?"
    if program == "triton_python_backend_stub":
        return Path(command[1]).parent.parent.name
    if "juicefs" in " ".join(command[:1]):
        return "object store"
    return "guard" if any(part.endswith("guard.py") for part in command) else program


def thirds(times_s: Any, values: Any, began_s: float, ends_s: float) -> tuple[float, float]:
    """Medians of the second and of the last third of the run."""
    share = (np.asarray(times_s) - began_s) / (ends_s - began_s)
    values = np.asarray(values)
    return (
        float(np.median(values[(share > 1 / 3) & (share <= 2 / 3)])),
        float(np.median(values[share > 2 / 3])),
    )


def per_window(latencies: list[tuple[float, float, str]], began_s: float, window_s: float) -> Any:
    """[(minute, p50 ms, p99 ms, requests)]"""
    at = np.array([when for when, _, _ in latencies]) - began_s
    took = np.array([ms for _, ms, _ in latencies])
    rows = []
    for start in np.arange(0, at.max(), window_s):
        here = took[(at >= start) & (at < start + window_s)]
        if len(here) >= 20:
            p50, p99 = np.percentile(here, [50, 99])
            rows.append(((start + window_s / 2) / 60, float(p50), float(p99), len(here)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--instances", type=int, default=1)
    parser.add_argument("--control-trace", type=Path, nargs="*", default=[])
    parser.add_argument("--json", type=Path, default=PROJECT / "benchmarks/results/soak.json")
    parser.add_argument("--picture", type=Path, default=PROJECT / "docs/images/soak.png")
    options = parser.parse_args()
    console = Console()
    events: list[str] = []
    with tempfile.TemporaryDirectory(prefix="ctrlcache-soak-") as scratch:
        config = RuntimeConfig(
            PROJECT / "model_repository",
            http_port=0,
            grpc_port=0,
            metrics_port=0,
            instances=options.instances,
            parameters={"hot_size_bytes": "1GiB", "max_sessions": str(options.sessions + 4)},
            warm_dir=Path(scratch) / "warm",
            objects_dir=Path(scratch) / "objects",
        )
        with Runtime(config) as runtime:
            supervisor = Supervisor(runtime, on_event=lambda event: _note(events, event))
            supervisor.start()
            people, watch, span = soak(runtime, options, console)
            supervisor.stop()
        supervisor.join(30)
        left = processes.shm_entries(runtime.run_id)
    report(people, watch, span, events, [str(path) for path in left], options, console)


def _note(events: list[str], event: SupervisorEvent) -> None:
    """What the supervisor had to do; that all is well is no news."""
    if isinstance(event, Lost | Recovered | GaveUp):
        events.append(repr(event))


def soak(
    runtime: Runtime, options: Any, console: Console
) -> tuple[list[Person], Watch, tuple[float, float]]:
    """Everybody works until the time is over."""
    stop, watch = threading.Event(), Watch(runtime)
    people = [
        Person(runtime.endpoints.grpc, n, options.sessions, options.control_trace, stop)
        for n in range(options.sessions)
    ]
    began = time.monotonic()
    ends = began + 60 * options.minutes
    for person in people:
        person.start()
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task(f"{options.sessions} people at work", total=60 * options.minutes)
        while (now := time.monotonic()) < ends:
            watch.look()
            progress.update(task, completed=now - began)
            time.sleep(min(SAMPLE_S, max(0.0, ends - time.monotonic())))
    stop.set()
    for person in people:
        person.join(90)
    return people, watch, (began, ends)


def report(
    people: list[Person],
    watch: Watch,
    span: tuple[float, float],
    events: list[str],
    left: list[str],
    options: Any,
    console: Console,
) -> None:
    began, ends = span
    latencies = sorted(one for person in people for one in person.latencies)
    refused = [text for person in people for text in person.refused]
    kinds = {kind: sum(k == kind for *_, k in latencies) for kind in ("hit", "near", "computed")}
    window_s = 60.0 if options.minutes >= 10 else 10.0
    windows = per_window(latencies, began, window_s)
    times = [sample["at_s"] for sample in watch.samples]
    measured = {
        name: thirds(times, [sample[name] for sample in watch.samples], began, ends)
        for name in ("memory_mb", "shm_mb", "files")
    }
    minutes = [began + 60 * row[0] for row in windows]
    for name, column in (("p50_ms", 1), ("p99_ms", 2)):
        measured[name] = thirds(minutes, [row[column] for row in windows], began, ends)
    table = Table("", "second third", "last third", "change", "flat within", "")
    flat = {}
    for name, (middle, last) in measured.items():
        change = last / middle - 1 if middle else 0.0
        # Shared memory fills up to its limit, and what shrinks is no leak.
        flat[name] = change <= FLAT[name]
        verdict = "[green]flat[/]" if flat[name] else "[red]grows[/]"
        table.add_row(
            name, f"{middle:.1f}", f"{last:.1f}", f"{change:+.1%}", f"{FLAT[name]:.0%}", verdict
        )
    console.print(table)
    console.print(
        f"{len(latencies)} answers in {options.minutes:g} min ({kinds}), {len(refused)} refused, "
        f"supervisor: {events or 'nothing to do'}, left in shared memory: {left or 'nothing'}"
    )
    options.json.write_text(
        json.dumps(
            {
                "made_on": machine(),
                "minutes": options.minutes,
                "sessions": options.sessions,
                "instances": options.instances,
                "hands": "recorded" if options.control_trace else "drawn",
                "answers": kinds,
                "refused": refused[:20],
                "supervisor": events,
                "left_in_shm": left,
                "thirds": measured,
                "flat": flat,
                "latency_by_minute": windows,
                "samples": [
                    {k: round(v - began if k == "at_s" else v, 1) for k, v in sample.items()}
                    for sample in watch.samples[:: max(1, len(watch.samples) // 120)]
                ],
            },
            indent=1,
        )
        + "\n"
    )
    draw(windows, watch.samples, began, options)
    if not all(flat.values()) or left or refused:
        sys.exit("something grows, was refused or was left behind")


def draw(windows: Any, samples: list[dict[str, float]], began: float, options: Any) -> None:
    """The picture of it, where matplotlib is installed."""
    try:
        import matplotlib
    except ImportError:
        print("no picture: matplotlib is not installed (pip install matplotlib)")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    minutes = [(sample["at_s"] - began) / 60 for sample in samples]
    figure, axes = plt.subplots(2, 2, figsize=(9, 5), sharex=True, constrained_layout=True)
    latency, memory, shm, files = axes.flat
    for column, name, color in ((1, "p50", "#1f6fb2"), (2, "p99", "#c2571a")):
        latency.plot(
            [row[0] for row in windows], [row[column] for row in windows], color, label=name
        )
    latency.set(ylabel="latency (ms)", yscale="log")
    latency.legend(frameon=False)
    names = sorted({k.split("/")[1] for s in samples for k in s if k.startswith("memory_mb/")})
    for name in names:
        for axis, what in ((memory, "memory_mb"), (files, "files")):
            series = [sample.get(f"{what}/{name}", np.nan) for sample in samples]
            axis.plot(minutes, series, label=name)
    memory.set(ylabel="private memory (MB)", ylim=(0, None))
    memory.legend(frameon=False, fontsize=7)
    shm.plot(minutes, [sample["shm_mb"] for sample in samples], "#1f6fb2")
    shm.set(ylabel="/dev/shm (MB)", xlabel="minutes", ylim=(0, None))
    files.set(ylabel="open files", xlabel="minutes", ylim=(0, None))
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{options.sessions} people at work, {options.minutes:g} minutes", fontsize=11)
    figure.savefig(options.picture, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
