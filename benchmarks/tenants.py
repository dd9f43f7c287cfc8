"""Whether one tenant can tell from the time of an answer what another one has asked.

    python benchmarks/tenants.py [--pairs 400] [--scenes 8] [--json FILE]

Tenant A shows scenes and asks questions about them. Then tenant B, in sessions of its own on the
same scenes, asks these and others that nobody has asked, in random order, each once. Were anything
shared, the first would be faster. Printed and kept: medians, their ratio with a 95 % interval
(bootstrap), the two-sided p of Mann and Whitney, and, so that it is seen what the test would find,
the same for A's own repeats against questions that A has not asked.

The questions of both kinds come from one distribution, far enough from each other that none is a
neighbour of another one. Runs on the server of `ctrlcache up`, with the shipped weights.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from scipy.stats import mannwhitneyu

from worldserve.bench.report import machine
from worldserve.runtime import Runtime, RuntimeConfig
from worldserve.settings import default_instances

PROJECT = Path(__file__).resolve().parent.parent
CONTEXT, BOOTSTRAPS = 16, 10_000
#: What an answer is asked for here: all that the cache could make faster.
OUTPUTS = ("STATE", "PREDICTED_FRAMES")

Series = NDArray[np.float64]


@dataclass(frozen=True)
class Scene:
    """frames (T, h, w, 3), controls (T, 4) that led through them, prompt."""

    frames: NDArray[np.uint8]
    controls: NDArray[np.float32]
    prompt: str


@dataclass(frozen=True)
class Comparison:
    """ratio: of the medians, asked over unasked. interval: of 95 % of the resamples. p: that times
    so different come from one distribution."""

    asked_ms: float
    unasked_ms: float
    ratio: float
    interval: tuple[float, float]
    p: float
    pairs: int


class Person:
    """A session of one tenant. `ask` gives the milliseconds until the answer was here."""

    def __init__(self, client: triton.InferenceServerClient, tenant: str, id: str) -> None:
        self._client = client
        self._tenant = tenant
        self._id = id

    def show(self, scene: Scene) -> None:
        self._infer(scene.controls, scene.frames, scene.prompt, True)

    def ask(self, control: NDArray[np.float32]) -> float:
        began = time.perf_counter()
        self._infer(control[None], None, "", False)
        return (time.perf_counter() - began) * 1e3

    def _infer(
        self,
        controls: NDArray[np.float32],
        frames: NDArray[np.uint8] | None,
        prompt: str,
        start: bool,
    ) -> None:
        inputs = [triton.InferInput("CONTROL", list(controls.shape), "FP32")]
        inputs[0].set_data_from_numpy(np.ascontiguousarray(controls, np.float32))
        if frames is not None:
            inputs.append(triton.InferInput("FRAMES", list(frames.shape), "UINT8"))
            inputs[1].set_data_from_numpy(frames)
        parameters: dict[str, str] = {"tenant": self._tenant}
        if prompt:
            parameters["prompt"] = prompt
        self._client.infer(
            "world_model",
            inputs,
            outputs=[triton.InferRequestedOutput(name) for name in OUTPUTS],
            sequence_id=self._id,
            sequence_start=start,
            parameters=parameters,
        )


def compare(asked: Series, unasked: Series, draw: np.random.Generator) -> Comparison:
    """Both as they came, in ms."""
    size = min(len(asked), len(unasked))
    resampled = [
        np.median(draw.choice(asked, len(asked))) / np.median(draw.choice(unasked, len(unasked)))
        for _ in range(BOOTSTRAPS)
    ]
    low, high = np.percentile(resampled, [2.5, 97.5])
    return Comparison(
        asked_ms=float(np.median(asked)),
        unasked_ms=float(np.median(unasked)),
        ratio=float(np.median(asked) / np.median(unasked)),
        interval=(float(low), float(high)),
        p=float(mannwhitneyu(asked, unasked).pvalue),
        pairs=size,
    )


def scenes(directory: Path, count: int) -> list[Scene]:
    """Pieces of the shipped clips, none of them twice."""
    found = []
    for path in sorted(directory.glob("*.npz")):
        with np.load(path) as clip:
            frames, controls = clip["frames"], clip["controls"]
        prompt = path.stem.replace("-", " ")
        for at in range(0, len(controls) - CONTEXT, CONTEXT):
            piece = slice(at, at + CONTEXT)
            found.append(Scene(frames[piece], controls[piece].astype(np.float32), prompt))
    if len(found) < count:
        raise SystemExit(f"the clips hold {len(found)} scenes, --scenes asks for {count}")
    return found[:: len(found) // count][:count]


def apart(count: int, draw: np.random.Generator, least: float = 0.35) -> NDArray[np.float32]:
    """Questions (N, 4), no two of them nearer to each other than `least`."""
    made: list[NDArray[np.float32]] = []
    for _ in range(200_000):
        one = draw.uniform(-1, 1, 4).astype(np.float32)
        if all(np.linalg.norm(one - other) >= least for other in made):
            made.append(one)
            if len(made) == count:
                return np.stack(made)
    raise SystemExit(f"only {len(made)} questions fit with {least} between them; fewer --pairs")


def measure(
    grpc: str, shown: list[Scene], pairs: int, pause_s: float, draw: np.random.Generator
) -> dict[str, tuple[Series, Series]]:
    """(asked, unasked) of B against A's questions, and of A against its own."""
    client = triton.InferenceServerClient(grpc)
    times: dict[str, tuple[list[float], list[float]]] = {
        "another tenant's": ([], []),
        "one's own": ([], []),
    }
    each = -(-pairs // len(shown))
    with Progress() as progress:
        task = progress.add_task("scenes", total=len(shown))
        for number, scene in enumerate(shown):
            questions = apart(3 * each, draw)
            asked, mine, theirs = (
                questions[:each],
                questions[each : 2 * each],
                questions[2 * each :],
            )
            a = Person(client, "a", f"a-{number}")
            a.show(scene)
            for control in asked:
                a.ask(control)
            time.sleep(pause_s)  # what the server does afterwards is over
            b = Person(client, "b", f"b-{number}")
            b.show(scene)
            for name, person, new in (("another tenant's", b, theirs), ("one's own", a, mine)):
                order = [(control, 0) for control in asked] + [(control, 1) for control in new]
                for at in draw.permutation(len(order)):
                    control, kind = order[at]
                    times[name][kind].append(person.ask(control))
            progress.advance(task)
    client.close()
    return {name: (np.array(asked), np.array(new)) for name, (asked, new) in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", type=int, default=400)
    parser.add_argument("--scenes", type=int, default=8)
    parser.add_argument("--pause-s", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clips", type=Path, default=PROJECT / "client_examples/clips")
    parser.add_argument(
        "--json", type=Path, default=Path(__file__).parent / "results" / "tenants.json"
    )
    args = parser.parse_args()
    draw = np.random.default_rng(args.seed)
    config = RuntimeConfig.aside(
        PROJECT / "model_repository",
        instances=default_instances(),
    )
    shown = scenes(args.clips, args.scenes)
    with Runtime(config) as runtime:
        times = measure(runtime.endpoints.grpc, shown, args.pairs, args.pause_s, draw)
    found = {name: compare(asked, new, draw) for name, (asked, new) in times.items()}
    table = Table("what was asked before", "asked, ms", "not asked, ms", "ratio (95 %)", "p")
    for name, one in found.items():
        table.add_row(
            name,
            f"{one.asked_ms:.1f}",
            f"{one.unasked_ms:.1f}",
            f"{one.ratio:.3f} ({one.interval[0]:.3f} to {one.interval[1]:.3f})",
            f"{one.p:.3g}",
        )
    Console().print(table)
    args.json.parent.mkdir(exist_ok=True)
    report = {
        "made_on": machine(),
        "settings": {"pairs": args.pairs, "scenes": args.scenes, "seed": args.seed},
        "found": {name: vars(one) for name, one in found.items()},
        "ms": {name: {"asked": list(a), "unasked": list(n)} for name, (a, n) in times.items()},
    }
    args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
