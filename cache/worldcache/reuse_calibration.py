"""The calibration of step reuse, tied to one set of model weights.

It says for each policy and number of steps which setting keeps a quality budget. It is stored as
JSON beside the weights and refused where their digest differs. Whatever is not calibrated is
computed: no file, another digest, another number of steps or a budget that was never reached give
the policy `none`.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctrlcache.errors import CalibrationError
from worldcache.content import Content, Rung, peak_db
from worldcache.policies import Always, Chunkwise, Controlled, EasyCache, TeaCache
from worldcache.steps import Policy, Reuses
from worldcache.weights import WeightSettings

__all__ = [
    "POLICIES",
    "Knob",
    "ReuseCalibration",
    "StepTable",
    "make",
    "peak_quantile",
    "quality_db",
    "reuse_path",
]

POLICIES = ("none", "teacache", "easycache", "control", "chunk", "content")
_FORMAT = 1


def reuse_path(weights_directory: Path) -> Path:
    """Where the calibration of the weights in `weights_directory` is kept."""
    return weights_directory / "reuse.json"


def quality_db(relative_error: float) -> float:
    """A root mean square error as a share of full scale -> PSNR in dB."""
    return -20 * math.log10(max(relative_error, 1e-9))


def peak_quantile(rmse: NDArray[np.float64], delta: float) -> tuple[float, float]:
    """(PSNR that all but a share `delta` of chunks keep, mean PSNR) in dB, from errors (M,) in
    8-bit levels."""
    peaks = np.sort([peak_db(float(level)) for level in rmse])
    rank = max(int(np.floor(delta * (len(peaks) + 1))) - 1, 0)
    return float(peaks[rank]), float(peaks.mean())


def make(name: str, knob: float) -> Policy:
    """A policy with one knob, set."""
    match name:
        case "none":
            return Always()
        case "teacache":
            return TeaCache(threshold=knob)
        case "easycache":
            return EasyCache(threshold=knob)
        case "control":
            return Controlled(period=int(knob))
        case "chunk":
            return Chunkwise(period=int(knob))
    raise ValueError(f"policy {name!r} has no knob; those that have: {', '.join(POLICIES[1:-1])}")


@dataclass(frozen=True)
class Knob:
    """A setting and what it gave: PSNR that all but a share delta of chunks kept, mean PSNR, share
    of block evaluations skipped."""

    value: float
    kept_db: float
    mean_db: float
    skipped: float


@dataclass(frozen=True, eq=False)
class StepTable:
    """For one number of steps: knobs of the policies, ladder and slopes of `content`. The knob of
    `content` is the bound that each chunk must keep by what its activity promises, which is more
    careful than what all chunks together then keep."""

    knobs: Mapping[str, tuple[Knob, ...]] = field(default_factory=dict)
    ladder: tuple[Rung, ...] = ()
    slopes: Mapping[tuple[int, int, int], float] = field(default_factory=dict)
    reuses: Reuses = "step"

    def content(self, bound_db: float) -> Content:
        return Content(
            ladder=self.ladder, slopes=self.slopes, quality_db=bound_db, reuses=self.reuses
        )

    def alone(self, rung: Rung) -> Content:
        """`content` that follows one rung whatever comes: for measuring it."""
        always = replace(rung, factor=0.0, floor=0.0)
        return Content(ladder=(always,), slopes=self.slopes, reuses=self.reuses)


@dataclass(frozen=True, eq=False)
class ReuseCalibration:
    """tables: by number of steps. change (B, R, K): how much each block's features change from step
    to step, by region. delta: share of chunks that may miss the budget. cases: generations it was
    made from."""

    weights_digest: str
    tables: Mapping[int, StepTable]
    settings: WeightSettings = field(default_factory=WeightSettings)
    change: NDArray[np.float32] = field(default_factory=lambda: np.zeros((0, 1, 1), np.float32))
    delta: float = 0.05
    cases: int = 0
    created: str = ""

    def policy(self, name: str, steps: int, budget_db: float) -> Policy:
        """The policy that keeps `budget_db`; `none` where there is no proof that it would."""
        if name not in POLICIES:
            raise ValueError(f"policy must be one of {', '.join(POLICIES)}, got {name!r}")
        table = self.tables.get(steps)
        if name == "none" or table is None:
            return Always()
        kept = [knob for knob in table.knobs.get(name, ()) if knob.kept_db >= budget_db]
        if not kept:
            return Always()
        best = max(kept, key=lambda knob: knob.skipped).value
        return table.content(best) if name == "content" else make(name, best)

    @property
    def digest(self) -> str:
        """Names what it says: other decisions, another digest."""
        return hashlib.blake2b(self._text().encode(), digest_size=8).hexdigest()

    def save(self, path: Path) -> None:
        beside = path.with_name(f"{path.name}.{os.getpid()}.new")
        beside.write_text(self._text())
        beside.replace(path)

    def _text(self) -> str:
        raw = {
            "format": _FORMAT,
            "weights_digest": self.weights_digest,
            "created": self.created,
            "delta": self.delta,
            "cases": self.cases,
            "settings": asdict(self.settings),
            "change": np.round(self.change.astype(float), 5).tolist(),
            "tables": {str(steps): _write(table) for steps, table in self.tables.items()},
        }
        return json.dumps(raw, indent=1) + "\n"

    @classmethod
    def load(cls, path: Path, weights_digest: str) -> ReuseCalibration:
        """CalibrationError where there is none, it cannot be read, or it is of other weights."""
        try:
            raw = json.loads(path.read_text())
            if raw["format"] != _FORMAT:
                raise CalibrationError(f"{path} has format {raw['format']}, {_FORMAT} is needed")
            made = cls(
                weights_digest=str(raw["weights_digest"]),
                tables={int(steps): _read(table) for steps, table in raw["tables"].items()},
                settings=WeightSettings(**raw["settings"]),
                change=np.asarray(raw["change"], np.float32),
                delta=float(raw["delta"]),
                cases=int(raw["cases"]),
                created=str(raw["created"]),
            )
        except FileNotFoundError:
            raise CalibrationError(
                f"there is no {path}: make it with `ctrlcache calibrate reuse`"
            ) from None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CalibrationError(f"{path} is no calibration of step reuse: {error}") from error
        if made.weights_digest != weights_digest:
            raise CalibrationError(
                f"{path} was made for weights {made.weights_digest[:12]}, these are "
                f"{weights_digest[:12]}: run `ctrlcache calibrate reuse` again"
            )
        return made

    def with_table(self, steps: int, table: StepTable) -> ReuseCalibration:
        return replace(self, tables={**self.tables, steps: table})


def _write(table: StepTable) -> dict[str, Any]:
    return {
        "knobs": {name: [asdict(knob) for knob in knobs] for name, knobs in table.knobs.items()},
        "reuses": table.reuses,
        "ladder": [asdict(rung) for rung in table.ladder],
        "slopes": [[*key, round(value, 5)] for key, value in table.slopes.items()],
    }


def _read(raw: dict[str, Any]) -> StepTable:
    rungs = [
        Rung(tuple(int(s) for s in rung["steps"]), float(rung["factor"]), float(rung["floor"]))
        for rung in raw["ladder"]
    ]
    reuses = raw.get("reuses", "step")
    if reuses not in ("step", "blocks"):
        raise ValueError(f"reuses must be step or blocks, got {reuses!r}")
    if not all(math.isfinite(r.factor) and r.factor >= 0 <= r.floor for r in rungs):
        raise ValueError("factors and floors must be finite and not negative")
    return StepTable(
        knobs={
            name: tuple(Knob(**{k: float(v) for k, v in knob.items()}) for knob in knobs)
            for name, knobs in raw["knobs"].items()
        },
        ladder=tuple(rungs),
        slopes={(int(a), int(b), int(i)): float(value) for a, b, i, value in raw["slopes"]},
        reuses=reuses,
    )
