"""Scores agree with the derivatives of functions whose derivatives are known."""

from __future__ import annotations

import numpy as np
import pytest
from hunting import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ctrlcache.errors import InvalidInput
from ctrlcache.scores import (
    Scores,
    probe_controls,
    relative_error,
    scores_from_probes,
    standardise,
)
from ctrlcache.transfer import Reuse

H, S, C = 3, 10, 4
controls = arrays(np.float32, C, elements=st.floats(-1, 1, width=32))


class Parabola:
    """s_h(c) = base + A_h c + sum_k B_h[:, k] c_k^2 / 2: slope A + B c, second derivative B."""

    def __init__(self, seed: int = 0, bend: float = 1.0) -> None:
        rng = np.random.default_rng(seed)
        self.base = rng.normal(size=(H, S))
        self.linear = rng.normal(size=(H, S, C))
        self.square = bend * rng.normal(size=(H, S, C))

    def __call__(self, control: np.ndarray) -> np.ndarray:
        c = np.asarray(control, dtype=np.float64)
        return np.asarray(self.base + self.linear @ c + self.square @ (c * c) / 2)

    def score(self, control: np.ndarray, radius: float, scale: np.ndarray, **kw: object) -> Scores:
        at = probe_controls(control, radius)
        probes = np.stack([self(c) for c in at])
        return scores_from_probes(self(control), control, probes, at, scale, **kw)  # type: ignore


@given(controls, st.sampled_from([0.01, 0.05, 0.1, 0.5]))
def test_probes_stay_where_controls_can_be(control: np.ndarray, radius: float) -> None:
    """Two distinct probes per axis, within [-1, 1], differing along that axis only."""
    made = probe_controls(control, radius)
    assert made.shape == (2 * C, C)
    assert (np.abs(made) <= 1).all()
    offsets = made.astype(np.float64) - control
    own = np.repeat(np.eye(C, dtype=bool), 2, axis=0)
    assert (offsets[~own] == 0).all()
    steps = offsets[own].reshape(C, 2)
    assert (np.abs(steps) <= 2 * radius + 1e-6).all()
    assert (np.abs(steps) >= 0.99 * radius - 1e-6).all()
    assert (steps[:, 0] != steps[:, 1]).all()


@settings(max_examples=examples(50))
@given(controls, st.integers(0, 100), st.sampled_from([0.02, 0.05, 0.1]))
def test_scores_of_a_parabola_are_its_derivatives(
    control: np.ndarray, seed: int, radius: float
) -> None:
    """Three points determine a parabola, in the middle as at the edge of the control range."""
    model = Parabola(seed)
    scale = np.random.default_rng(seed).uniform(0.2, 3, S)
    scores = model.score(control, radius, scale, rho_max=10.0)
    slope = model.linear + model.square * control
    np.testing.assert_allclose(scores.jacobian, slope, rtol=2e-3, atol=5e-3)
    size = np.linalg.norm(model(control) / scale, axis=-1)
    rho = (np.linalg.norm(slope / scale[:, None], axis=(1, 2)) / size).max()
    assert scores.sensitivity == pytest.approx(rho, rel=1e-3)
    assert scores.stability == pytest.approx(10 - rho, rel=1e-3)
    bend = np.linalg.norm(model.square / scale[:, None], axis=1) / size[:, None]
    assert scores.curvature == pytest.approx(bend.max(), rel=2e-2)


def test_transferability_is_one_over_the_migrations_error() -> None:
    """ST follows the migration in use: plain reuse of a steep state is worth less."""
    model, control, scale = Parabola(bend=0.5), np.zeros(C, np.float32), np.full(S, 2.0)
    at = probe_controls(control, 0.1)
    truth = np.stack([model(c) for c in at])
    first = model.score(control, 0.1, scale)
    plain = model.score(control, 0.1, scale, migration=Reuse())
    mse = np.square((truth - model(control)) / 2).mean()
    assert plain.transferability == pytest.approx(1 / mse, rel=1e-5)
    assert first.transferability > 10 * plain.transferability


def test_constant_dimensions_do_not_count() -> None:
    """A dimension that never varied in training cannot blow up the scores."""
    model, control = Parabola(), np.zeros(C, np.float32)
    scale = np.ones(S)
    scale[3] = 0.0
    model.linear[:, 3] *= 1e3
    with_noise = model.score(control, 0.05, scale)
    model.linear[:, 3] = 0
    without = model.score(control, 0.05, scale)
    assert with_noise.sensitivity == pytest.approx(without.sensitivity)


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e9])
def test_unusable_probes_are_never_trusted(poison: float) -> None:
    """What is not finite, or overflows the stored Jacobian, has infinite curvature."""
    model, control = Parabola(), np.zeros(C, np.float32)
    at = probe_controls(control, 0.05)
    probes = np.stack([model(c) for c in at])
    probes[3, 1, 2] = poison
    scores = scores_from_probes(model(control), control, probes, at, np.ones(S))
    assert scores.curvature == np.inf
    assert scores.transferability == 0
    assert np.isfinite(scores.jacobian).all()


def test_relative_error_is_the_worst_step_in_standard_units() -> None:
    """Errors are measured per dimension's deviation, relative to the size of the true state."""
    truth = np.array([[3.0, 40.0], [6.0, 80.0]])  # standardised: (3, 4), (6, 8)
    estimate = truth + np.array([[0.5, 0], [0, 20.0]])  # off by 0.5 of 5, by 2 of 10
    scale = np.array([1.0, 10.0])
    assert relative_error(estimate, truth, scale) == pytest.approx(0.2)
    assert relative_error(estimate, truth, scale, slice(0, 1)) == pytest.approx(0.1)
    assert relative_error(np.stack([truth, estimate]), truth, scale).tolist() == pytest.approx(
        [0, 0.2]
    )
    assert standardise(truth, scale).tolist() == [[3, 4], [6, 8]]


def test_wrong_shapes_are_named() -> None:
    """Probes that do not belong to the couplet are refused."""
    model, control = Parabola(), np.zeros(C, np.float32)
    at = probe_controls(control, 0.05)
    probes = np.stack([model(c) for c in at])
    with pytest.raises(InvalidInput, match="must have shape"):
        scores_from_probes(model(control), control, probes[:-1], at, np.ones(S))
    with pytest.raises(InvalidInput, match="probe controls must have shape"):
        scores_from_probes(model(control), control, probes, at[:-1], np.ones(S))
    with pytest.raises(InvalidInput, match="along one axis"):
        scores_from_probes(model(control), control, probes, at[::-1], np.ones(S))
    for radius in (0.0, -0.1, 0.6, float("nan")):
        with pytest.raises(InvalidInput, match="radius"):
            probe_controls(control, radius)
    with pytest.raises(InvalidInput, match="within"):
        probe_controls(np.array([0, 0, 0, 1.2]), 0.05)
