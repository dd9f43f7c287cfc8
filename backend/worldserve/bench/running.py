"""`ctrlcache benchmark --url`: one person plays on a running server, with its cache and without."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ctrlcache.errors import InvalidInput
from worldserve.demo_client import Session
from worldserve.demo_script import Scene, load_scene, script
from worldserve.sequence_client import Reply

__all__ = ["Round", "measure_running", "play_round"]

_PRESENT = 15


@dataclass(frozen=True)
class Round:
    """Latencies by the client's clock, one per interaction; tiers of the answers."""

    cached_ms: list[float]
    plain_ms: list[float]
    tiers: list[str]
    approximate: int

    def ratio(self, percentile: float) -> float:
        """How many times faster with the cache."""
        plain = np.percentile(self.plain_ms, percentile)
        return float(plain / np.percentile(self.cached_ms, percentile))

    @property
    def hit_rate(self) -> float:
        return sum(tier != "none" for tier in self.tiers) / len(self.tiers)


def play_round(
    client: Any, scenes: list[Scene], tenant: str, max_error: float, pause_s: float
) -> Round:
    """Each interaction on two sessions in turn, one of them with cache=off.

    tenant: nobody else's, so that the round begins with nothing cached. pause_s: to think after
    each interaction, on both sessions alike.
    """
    cached: list[Reply] = []
    plain: list[Reply] = []
    for scene in scenes:
        sessions = (
            Session(client, scene.prompt, tenant=tenant, max_error=str(max_error)),
            Session(client, scene.prompt, tenant=tenant, cache="off"),
        )
        steps = script(scene)
        for number, step in enumerate(steps):
            for session, answers in zip(sessions, (cached, plain), strict=True):
                answers.append(session.ask(step, end=number + 1 == len(steps)))
                time.sleep(pause_s)
    return Round(
        [answer.latency_ms for answer in cached],
        [answer.latency_ms for answer in plain],
        [answer.tier for answer in cached],
        sum(not answer.exact for answer in cached),
    )


def measure_running(
    url: str, clips: Path, most: int, rounds: int, max_error: float, pause_s: float, out: Path
) -> None:
    """Play `rounds` rounds on the server at `url`, print ratios, and write all numbers to `out`."""
    import tritonclient.grpc as triton
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table
    from tritonclient.utils import InferenceServerException

    scenes = [load_scene(path, _PRESENT) for path in sorted(clips.glob("*.npz"))[:most]]
    if not scenes:
        raise InvalidInput(f"no .npz files in {clips}")
    played: list[Round] = []
    with triton.InferenceServerClient(url) as client:
        for number in track(range(rounds), description="rounds"):
            tenant = f"benchmark-{time.time_ns()}-{number}"
            try:
                played.append(play_round(client, scenes, tenant, max_error, pause_s))
            except InferenceServerException as error:
                raise SystemExit(f"{url}: {error.message()}") from error
    table = Table("", "median", "least", "most", title=f"{rounds} rounds on {len(scenes)} clips")
    rows: dict[str, list[float]] = {
        "times faster, p50": [r.ratio(50) for r in played],
        "times faster, p99": [r.ratio(99) for r in played],
        "hit rate": [r.hit_rate for r in played],
        "cached p50, ms": [float(np.percentile(r.cached_ms, 50)) for r in played],
        "cache=off p50, ms": [float(np.percentile(r.plain_ms, 50)) for r in played],
        "approximate answers": [float(r.approximate) for r in played],
    }
    for name, values in rows.items():
        shown = (float(np.median(values)), min(values), max(values))
        table.add_row(name, *(f"{value:.2f}" for value in shown))
    Console().print(table)
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"rounds": [vars(r) for r in played]}, indent=1) + "\n")
