"""The calibrated trust in approximate answers, tied to one set of model weights.

`TrustModel` is what serving uses; `fit` (in `conformal`) makes one from held-out pairs of controls.
It is stored as JSON beside the weights and refused where their digest differs.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctrlcache.errors import CalibrationError

__all__ = ["CoverageRow", "TrustModel", "trust_path"]

_FORMAT = 1


def trust_path(weights_directory: Path) -> Path:
    """Where the calibration of the weights in `weights_directory` is kept."""
    return weights_directory / "trust.json"


@dataclass(frozen=True)
class CoverageRow:
    """Of the held-out uses that a budget accepts in a group, how many exceeded their bound.

    group: `all`, `distance a-b`, `curvature low|middle|high`, `one axis` or `several axes`.
    share = over / accepted. contexts: how many different scenes the accepted uses come from.
    """

    group: str
    budget: float
    accepted: int
    over: int
    contexts: int

    @property
    def share(self) -> float:
        return self.over / self.accepted if self.accepted else 0.0


@dataclass(frozen=True)
class TrustModel:
    """bound = floor + q (curvature + kappa0)^a distance^p, for distances up to `max_distance`.

    Relative state errors, distances in control units. At most a share `delta` of accepted uses
    exceeds the bound (docs/trust.md says how that was calibrated and measured). `migration` names
    what the bound holds for, `horizon` the longest trajectory. stability_threshold and
    transferability_threshold: 25th percentiles over the calibration couplets, which the policy
    `fixed` starts from; rho_max: 99th percentile of their sensitivity. frame_distance: control
    distance up to which a neighbour's frames keep `frame_psnr_db` in a share 1 - delta of pairs;
    frame_change: the same in terms of sensitivity x distance. 0 means never.

    What is taken over from k frames ago: drawn_change[k]: as frame_change, for frames that are
    drawn from tokens moved along a slope of that age (k = 0: the couplet's own), which are to keep
    `drawn_psnr_db`. lent_curvature[k - 1]: by how much more curved a Jacobian of that age is to be
    taken. What these do not reach is neither drawn nor lent.
    """

    weights_digest: str
    migration: str
    delta: float
    q: float
    kappa0: float
    curvature_power: float
    distance_power: float
    floor: float
    max_distance: float
    probe_radius: float
    horizon: int
    rho_max: float
    stability_threshold: float
    transferability_threshold: float
    frame_psnr_db: float
    frame_distance: float
    frame_change: float
    pairs: int
    contexts: int
    created: str
    coverage: tuple[CoverageRow, ...] = ()
    drawn_psnr_db: float = 40.0
    drawn_change: tuple[float, ...] = ()
    lent_curvature: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        numbers = [f.name for f in fields(self) if f.type == "float"]
        for name in numbers:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise CalibrationError(f"{name} must be a number, got {value!r}")
            if not math.isfinite(value):
                raise CalibrationError(f"{name} must be finite, got {value}")
        signed = {"stability_threshold"}
        negative = [n for n in numbers if n not in signed and getattr(self, n) < 0]
        if negative:
            raise CalibrationError(f"{negative[0]} must not be negative")
        for name, least in (("drawn_change", 0.0), ("lent_curvature", 1.0)):
            if not all(math.isfinite(v) and v >= least for v in getattr(self, name)):
                raise CalibrationError(f"{name} must be finite and at least {least:g}")
        if not (self.q > 0 and self.distance_power > 0 and 0 < self.delta < 1):
            raise CalibrationError(
                "q > 0, distance_power > 0 and delta in (0, 1) are needed, got "
                f"{self.q}, {self.distance_power}, {self.delta}"
            )

    def bound(self, curvature: float, distance: float) -> float:
        """Bound on the relative state error of an answer from `distance` away; inf: never."""
        if not (math.isfinite(curvature) and 0 <= distance <= self.max_distance):
            return math.inf
        touchy = (curvature + self.kappa0) ** self.curvature_power
        return float(self.floor + self.q * touchy * distance**self.distance_power)

    def bounds(
        self, curvature: NDArray[np.float64], distance: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """`bound` for arrays (broadcast)."""
        touchy = (curvature + self.kappa0) ** self.curvature_power
        made = self.floor + self.q * touchy * distance**self.distance_power
        sound = np.isfinite(curvature) & (distance >= 0) & (distance <= self.max_distance)
        bounds: NDArray[np.float64] = np.where(sound, made, np.inf)
        return bounds

    def radius(self, curvature: float, max_error: float) -> float:
        """The largest distance at which the bound stays within `max_error`; 0: never."""
        if not math.isfinite(curvature) or not max_error > self.floor:
            return 0.0
        touchy = self.q * (curvature + self.kappa0) ** self.curvature_power
        if touchy <= 0:
            return self.max_distance
        reach = ((max_error - self.floor) / touchy) ** (1 / self.distance_power)
        return float(min(reach, self.max_distance))

    def mean_radius(self, curvature: NDArray[np.float64], budgets: Sequence[float]) -> float:
        """Mean trust radius over couplets of these curvatures (n,) and over the budgets."""
        each = [self.radius(float(c), budget) for c in curvature for budget in budgets]
        return float(np.mean(each)) if each else 0.0

    def frame_radius(self, stability: float | None = None) -> float:
        """Distance within which a couplet's frames may stand for a neighbour's.

        With the couplet's stability (CS), calm couplets lend their frames farther than touchy ones.
        """
        if stability is None:
            return min(self.frame_distance, self.max_distance)
        return self._reach(self.frame_change, stability)

    def drawn_radius(self, stability: float, frames: int = 0) -> float:
        """Distance within which a neighbour's frames may be drawn from a couplet's tokens, moved
        along a slope that was probed `frames` frames ago."""
        if not 0 <= frames < len(self.drawn_change):
            return 0.0
        return self._reach(self.drawn_change[frames], stability)

    def lent_factor(self, frames: int) -> float:
        """By how much more curved a Jacobian, probed `frames` frames ago, is to be taken; inf: it
        is not to be used at all."""
        if not 0 <= frames <= len(self.lent_curvature):
            return math.inf
        return self.lent_curvature[frames - 1] if frames else 1.0

    def _reach(self, change: float, stability: float) -> float:
        sensitivity = self.rho_max - stability
        if math.isnan(sensitivity) or math.isinf(sensitivity):
            return 0.0
        if sensitivity * self.max_distance <= change:
            return self.max_distance
        return change / sensitivity

    def save(self, path: Path) -> None:
        """Write JSON, atomically."""
        record: dict[str, Any] = {"format": _FORMAT, **asdict(self)}
        partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
        partial.write_text(json.dumps(record, indent=1) + "\n")
        partial.replace(path)

    @classmethod
    def load(cls, path: Path, weights_digest: str) -> TrustModel:
        """CalibrationError where it is absent, unreadable or belongs to other weights."""
        advice = "calibrate with `ctrlcache calibrate model`"
        try:
            record = json.loads(path.read_text())
        except FileNotFoundError:
            raise CalibrationError(f"{path} is not there; {advice}") from None
        except (OSError, ValueError) as error:
            raise CalibrationError(f"{path} cannot be read ({error}); {advice}") from error
        if not isinstance(record, dict) or record.pop("format", None) != _FORMAT:
            raise CalibrationError(f"{path} is not of format {_FORMAT}; {advice}")
        found = record.get("weights_digest")
        if found != weights_digest:
            raise CalibrationError(
                f"{path} was made for weights {found}, this model has {weights_digest}; {advice}"
            )
        try:
            rows = tuple(CoverageRow(**row) for row in record.pop("coverage", ()))
            for name in ("drawn_change", "lent_curvature"):
                record[name] = tuple(map(float, record.get(name, ())))
            return cls(**record, coverage=rows)
        except (TypeError, ValueError) as error:
            raise CalibrationError(f"{path} does not fit ({error}); {advice}") from error
