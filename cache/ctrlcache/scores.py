"""Scores of a couplet, from one batch of prediction probes around its control.

Norms and errors of states are taken in standardised units: each dimension divided by its standard
deviation over the training data (`ModelSpec.state_scale`); `relative_error` is the one definition
of "state error" that bounds, budgets and reports use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctrlcache.errors import InvalidInput
from ctrlcache.transfer import Jacobian, Migration

__all__ = ["Scores", "probe_controls", "relative_error", "scores_from_probes", "standardise"]

Float = NDArray[np.float32]
AnyFloat = NDArray[np.floating[Any]]

_TINY = 1e-12


@dataclass(frozen=True, eq=False)
class Scores:
    """What probing a couplet tells.

    sensitivity: rho = max over steps of ||J||_F / ||s||: relative state change per unit of control.
    stability: CS = rho_max - rho. transferability: ST = 1 / MSE of predicting the probed states
    from the couplet by the migration in use (standardised). curvature: max over axes and steps of
    ||d2s/dc2|| / ||s||, per squared unit of control; infinite where the probes cannot be trusted
    (not finite), so that nothing is ever derived from them. jacobian (H, S, C) float16,
    d(state)/d(control) in the state's own units.
    """

    sensitivity: float
    stability: float
    transferability: float
    curvature: float
    jacobian: NDArray[np.float16]


def probe_controls(control: AnyFloat, radius: float) -> Float:
    """Two controls per axis around `control` (C,): (2 C, C), axis by axis.

    One `radius` on either side; where that would leave [-1, 1] (which no user can ask for and no
    model was trained on), one and two radii to the side that is open. So every probe is also an
    exact answer that someone may want.
    """
    centre = np.asarray(control, dtype=np.float32)
    if centre.ndim != 1 or not (np.abs(centre) <= 1).all():
        raise InvalidInput(f"control must be (C,) within [-1, 1], got {centre}")
    if not 0 < radius <= 0.5:
        raise InvalidInput(f"probe radius must be in (0, 0.5], got {radius}")
    high, low = centre + radius > 1, centre - radius < -1
    first = np.where(high, -radius, radius)
    second = np.where(high, -2 * radius, np.where(low, 2 * radius, -radius))
    axes = centre.size
    probes = np.repeat(centre[None], 2 * axes, axis=0)  # (2 C, C)
    probes[np.arange(0, 2 * axes, 2), np.arange(axes)] += first.astype(np.float32)
    probes[np.arange(1, 2 * axes, 2), np.arange(axes)] += second.astype(np.float32)
    return np.clip(probes, -1, 1)


def scores_from_probes(
    states: AnyFloat,
    control: AnyFloat,
    probes: AnyFloat,
    controls: AnyFloat,
    scale: AnyFloat,
    rho_max: float = 1.0,
    migration: Migration | None = None,
) -> Scores:
    """Score a couplet with states (H, S) at `control` (C,).

    probes (2 C, H, S): states predicted at `controls` (2 C, C), as `probe_controls` gave them.
    scale (S,): standard deviation of each state dimension. rho_max: from calibration. migration:
    the one in use (default: first order).
    """
    centre = np.asarray(control, dtype=np.float64)
    _check(states, centre, probes, controls)
    inverse = _inverse(scale)
    size = np.maximum(np.linalg.norm(states * inverse, axis=-1), _TINY)  # (H,)
    with np.errstate(over="ignore", invalid="ignore"):  # judged below
        slope, bend = _differences(states, centre, probes, controls)  # (C, H, S) each
        stored = np.moveaxis(slope, 0, -1).astype(np.float16)  # (H, S, C)
        steepness = np.sqrt(np.square(slope * inverse).sum(axis=(0, 2))) / size  # (H,)
        curvature = np.linalg.norm(bend * inverse, axis=-1) / size  # (C, H)
        predicted = (migration or Jacobian()).migrate(
            np.asarray(states), stored, np.asarray(control), np.asarray(controls)
        )  # (2 C, H, S)
        mse = float(np.square((predicted - probes) * inverse).mean())
    rho = float(steepness.max())
    sound = np.isfinite(rho) and np.isfinite(mse) and bool(np.isfinite(stored).all())
    if not sound:
        return Scores(np.inf, -np.inf, 0.0, np.inf, np.zeros_like(stored))
    return Scores(rho, rho_max - rho, 1 / max(mse, _TINY), float(curvature.max()), stored)


def relative_error(
    estimate: AnyFloat, truth: AnyFloat, scale: AnyFloat, dims: slice = slice(None)
) -> NDArray[np.float64]:
    """max over steps of ||estimate - truth|| / ||truth||, standardised: (..., H, S) -> (...).

    `dims` restricts the difference to a part of the state (the norm below stays that of all of it),
    so that errors of parts are comparable with the whole.
    """
    inverse = _inverse(scale)
    difference = np.subtract(estimate, truth, dtype=np.float64) * inverse
    size = np.maximum(np.linalg.norm(truth * inverse, axis=-1), _TINY)
    ratio = np.linalg.norm(difference[..., dims], axis=-1) / size
    worst: NDArray[np.float64] = ratio.max(axis=-1)
    return worst


def standardise(states: AnyFloat, scale: AnyFloat) -> NDArray[np.float64]:
    """states (..., S) in units of each dimension's deviation; constant dimensions become 0."""
    standard: NDArray[np.float64] = states * _inverse(scale)
    return standard


def _inverse(scale: AnyFloat) -> NDArray[np.float64]:
    """1 / scale; 0 for dimensions that (next to the others) never vary and hold nothing to read."""
    wide = np.asarray(scale, dtype=np.float64)
    varies = wide > 1e-6 * wide.max()
    return np.divide(1.0, wide, out=np.zeros_like(wide), where=varies)


def _differences(
    states: AnyFloat, control: NDArray[np.float64], probes: AnyFloat, controls: AnyFloat
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """First and second derivatives along each axis (C, H, S), from three points at 0, a and b.

    The parabola through the three points; for a = -b = r these are the central differences.
    """
    axes = np.arange(control.size)
    a = (controls[0::2][axes, axes] - control)[:, None, None]  # (C, 1, 1)
    b = (controls[1::2][axes, axes] - control)[:, None, None]
    at_a = np.subtract(probes[0::2], states, dtype=np.float64)  # (C, H, S)
    at_b = np.subtract(probes[1::2], states, dtype=np.float64)
    slope = (at_b * a / b - at_a * b / a) / (a - b)
    bend = 2 * (at_a / a - at_b / b) / (a - b)
    return slope, bend


def _check(
    states: AnyFloat, control: NDArray[np.float64], probes: AnyFloat, controls: AnyFloat
) -> None:
    axes = control.size
    expected = (2 * axes, *states.shape)
    if control.ndim != 1 or states.ndim != 2 or probes.shape != expected:
        raise InvalidInput(
            f"probes of states {states.shape} and {axes} axes must have shape {expected}, "
            f"got {probes.shape}"
        )
    if controls.shape != (2 * axes, axes):
        raise InvalidInput(
            f"probe controls must have shape {(2 * axes, axes)}, got {controls.shape}"
        )
    offsets = controls[:, :] - control
    own = np.repeat(np.eye(axes, dtype=bool), 2, axis=0)
    pairs = offsets[own].reshape(axes, 2)
    if (offsets[~own] != 0).any() or (pairs == 0).any() or (pairs[:, 0] == pairs[:, 1]).any():
        raise InvalidInput("probe controls must differ from the couplet's along one axis each")
