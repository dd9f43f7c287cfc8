"""From the answers of a rival to its figures, and from two rivals to ratios with their spread."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ASSUMED_UNCACHED_S",
    "DEADLINES_S",
    "Score",
    "Spread",
    "approximate",
    "load_played",
    "scaled_deadline_ms",
    "score",
    "speed_up",
]

#: Reaction times that the suites' users have, on the hardware of the original report.
DEADLINES_S = {"kitchen": 0.5, "inspection": 0.8, "edudemo": 0.3}
#: What an uncached interaction took there. It says "seconds"; this is the least that can mean.
ASSUMED_UNCACHED_S = 2.0
_RESAMPLES = 1_000


def scaled_deadline_ms(suite: str, uncached_p50_ms: float) -> float:
    """The suite's deadline on this machine: as the uncached answers are to those of the original.

    A suite without a deadline of its own gets the kitchen's.
    """
    deadline_s = DEADLINES_S.get(suite, DEADLINES_S["kitchen"])
    return 1e3 * deadline_s * (uncached_p50_ms / 1e3) / ASSUMED_UNCACHED_S


@dataclass(frozen=True)
class Spread:
    """A ratio and the 95 % interval of it, sessions resampled."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}-{self.high:.2f})"


@dataclass(frozen=True, eq=False)
class Played:
    """All sessions of one rival. latency_ms: of each session's questions."""

    name: str
    sessions: list[dict[str, Any]] = field(repr=False)

    @property
    def answers(self) -> list[dict[str, Any]]:
        return [answer for session in self.sessions for answer in session["answers"]]

    def latencies(self) -> list[NDArray[np.float64]]:
        return [
            np.array([answer["latency_ms"] for answer in session["answers"]])
            for session in self.sessions
        ]


def approximate(answer: dict[str, Any]) -> bool:
    """Whether it was derived from a neighbour's. An answer that is not exact and has no bound is
    the model's own, its frames drawn with reuse between the generator's steps."""
    return not answer["exact"] and answer["bound"] > 0


@dataclass(frozen=True)
class Score:
    """Of one rival on one suite. hits: share by tier; approximate: share of all answers; reusing:
    share of answers that are the model's own but for reuse between the steps of their frames.
    blocks_reused: share of the generator's blocks that were not computed; features_found: of
    WorldCache's look-ups. Both None where there were none. opening_ms: until a session's first
    frames were taken, median, None where they are sent with each question.

    gripper_off_cm, object_off_cm: mean distance from the simulator's truth, None where unknown.
    over_bound: of the approximate answers, those whose error is over the stated bound.
    operation_right: share of answers, None where the model has no operations. change_*: mean and
    95th percentile of the difference to the uncached answers. psnr_db, ssim: median of answers that
    are not exact.
    """

    answers: int
    opening_ms: float | None
    p50_ms: float
    p90_ms: float
    p99_ms: float
    worst_ms: float
    hit_rate: float
    hits: dict[str, float]
    approximate: float
    reusing: float
    over_bound: float
    misses: float
    misses_absolute: float
    operation_right: float | None
    gripper_off_cm: float | None
    object_off_cm: float | None
    change_gripper_cm: tuple[float, float]
    change_object_cm: tuple[float, float]
    psnr_db: float | None
    ssim: float | None
    contradictions: float
    blocks_reused: float | None
    features_found: float | None
    cpu_s: float
    bytes: dict[str, float]


def load_played(folder: Path, name: str, suite: str, source: str) -> Played | None:
    """The sessions of a rival, or None where it has not played."""
    sessions = [json.loads(path.read_text()) for path in sorted((folder / name).glob("*.json"))]
    chosen = [s for s in sessions if s["suite"] == suite and s["source"] == source]
    return Played(name, chosen) if chosen else None


def score(played: Played, deadline_ms: float, deadline_absolute_ms: float) -> Score:
    answers = played.answers
    latency = np.array([answer["latency_ms"] for answer in answers])
    tiers = Counter(answer["tier"] for answer in answers)
    inexact = [answer for answer in answers if not answer["exact"]]
    near = [answer for answer in inexact if approximate(answer)]
    judged = [answer for answer in answers if "error" in answer]
    right = [a["operation_right"] for a in answers if a["operation_right"] is not None]
    hits = {tier: count / len(answers) for tier, count in tiers.items() if tier != "none"}
    drawn = [answer for answer in inexact if np.isfinite(answer.get("psnr_db", np.inf))]
    return Score(
        answers=len(answers),
        opening_ms=_median([s["opening_ms"] for s in played.sessions if s["opening_ms"]]),
        p50_ms=float(np.percentile(latency, 50)),
        p90_ms=float(np.percentile(latency, 90)),
        p99_ms=float(np.percentile(latency, 99)),
        worst_ms=float(latency.max()),
        hit_rate=sum(hits.values()),
        hits=hits,
        approximate=len(near) / len(answers),
        reusing=(len(inexact) - len(near)) / len(answers),
        over_bound=_mean([a["error"] > a["bound"] for a in near if "error" in a]) or 0.0,
        misses=float((latency > deadline_ms).mean()),
        misses_absolute=float((latency > deadline_absolute_ms).mean()),
        operation_right=_mean(right),
        gripper_off_cm=_mean([a["gripper_off_cm"] for a in answers if "gripper_off_cm" in a]),
        object_off_cm=_mean([a["object_off_cm"] for a in answers if "object_off_cm" in a]),
        change_gripper_cm=_mean_p95([a["gripper_cm"] for a in judged]),
        change_object_cm=_mean_p95([a["object_cm"] for a in judged]),
        psnr_db=_median([a["psnr_db"] for a in drawn]),
        ssim=_median([a["ssim"] for a in drawn]),
        contradictions=float(np.mean([a["contradicts"] for a in answers])),
        blocks_reused=_share(played, "blocks reused", "blocks computed"),
        features_found=_share(played, "lookups hit", "lookups miss"),
        cpu_s=float(sum(session["cpu_s"] for session in played.sessions)),
        bytes=max((s["bytes"] for s in played.sessions), key=lambda kept: sum(kept.values())),
    )


def speed_up(slow: Played, fast: Played, percentile: float, seed: int = 0) -> Spread:
    """How many times faster at a percentile. The same sessions of both are resampled together."""
    slow_ms, fast_ms = slow.latencies(), fast.latencies()
    if len(slow_ms) != len(fast_ms):
        raise ValueError(f"{slow.name} played {len(slow_ms)} sessions, {fast.name} {len(fast_ms)}")
    draw = np.random.default_rng(seed)

    def ratio(chosen: Sequence[int] | NDArray[np.int64]) -> float:
        above, below = (
            np.percentile(np.concatenate([part[i] for i in chosen]), percentile)
            for part in (slow_ms, fast_ms)
        )
        return float(above / below)

    resampled = [ratio(draw.integers(0, len(slow_ms), len(slow_ms))) for _ in range(_RESAMPLES)]
    low, high = np.percentile(resampled, [2.5, 97.5])
    return Spread(ratio(range(len(slow_ms))), float(low), float(high))


def _share(played: Played, counted: str, rest: str) -> float | None:
    """Of what WorldCache counted while these sessions were played."""
    part, others = (
        sum(session.get("worldcache", {}).get(name, 0.0) for session in played.sessions)
        for name in (counted, rest)
    )
    return part / (part + others) if part + others else None


def _mean(values: Sequence[float | bool]) -> float | None:
    return float(np.mean(values)) if len(values) else None


def _median(values: Sequence[float]) -> float | None:
    return float(np.median(values)) if len(values) else None


def _mean_p95(values: Sequence[float]) -> tuple[float, float]:
    if not len(values):
        return 0.0, 0.0
    return float(np.mean(values)), float(np.percentile(values, 95))
