"""Migrations move states with the control."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ctrlcache.errors import CalibrationError, ConfigError, InvalidInput
from ctrlcache.transfer import (
    MIGRATIONS,
    Adapter,
    BestOf,
    Jacobian,
    Migration,
    Reuse,
    make_migration,
)

H, S, C = 8, 12, 4


def make_adapter(seed: int = 0, hidden: int = 5, digest: str = "w1") -> Adapter:
    rng = np.random.default_rng(seed)
    return Adapter(
        rng.normal(size=(hidden, S + 2 * C)).astype(np.float32),
        rng.normal(size=(S, hidden)).astype(np.float32),
        rng.uniform(0.5, 2, S).astype(np.float32),
        digest,
    )


def sample(seed: int, *lead: int) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    return (
        rng.normal(size=(*lead, H, S)).astype(np.float32),
        rng.normal(size=(*lead, H, S, C)).astype(np.float16),
        rng.uniform(-1, 1, (*lead, C)).astype(np.float32),
        rng.uniform(-1, 1, (*lead, C)).astype(np.float32),
    )


ALL: list[Migration] = [Reuse(), Jacobian(), make_adapter(), BestOf(make_adapter())]


@pytest.mark.parametrize("migration", ALL, ids=lambda m: type(m).__name__)
def test_own_control_gives_own_states(migration: Migration) -> None:
    """Moving by nothing changes nothing, to the bit."""
    states, jacobian, control, _ = sample(0)
    made = migration.migrate(states, jacobian, control, control)
    assert made.dtype == np.float32
    assert (made == states).all()


@pytest.mark.parametrize("migration", ALL, ids=lambda m: type(m).__name__)
@given(seed=st.integers(0, 1_000))
def test_a_batch_is_its_members(migration: Migration, seed: int) -> None:
    """Leading dimensions broadcast: one couplet to many queries, and many to many."""
    states, jacobian, control, queries = sample(seed, 3)
    many = migration.migrate(states, jacobian, control, queries)
    each = [migration.migrate(*one) for one in zip(states, jacobian, control, queries, strict=True)]
    np.testing.assert_allclose(many, np.stack(each), rtol=1e-4, atol=1e-5)
    spread = migration.migrate(states[0], jacobian[0], control[0], queries)
    each = [migration.migrate(states[0], jacobian[0], control[0], q) for q in queries]
    np.testing.assert_allclose(spread, np.stack(each), rtol=1e-4, atol=1e-5)


@given(st.integers(0, 1_000))
def test_first_order_is_exact_for_linear_models(seed: int) -> None:
    """Where states depend linearly on the control, the migrated states are the true ones."""
    states, jacobian, control, query = sample(seed)
    truth = states + np.einsum("hsc,c->hs", jacobian.astype(np.float64), query - control)
    np.testing.assert_allclose(
        Jacobian().migrate(states, jacobian, control, query), truth, rtol=1e-4, atol=1e-4
    )


def test_first_order_without_jacobian_is_refused() -> None:
    """A couplet that was never scored cannot be moved to first order; BestOf falls back."""
    states, _, control, query = sample(0)
    with pytest.raises(InvalidInput, match="Jacobian"):
        Jacobian().migrate(states, None, control, query)
    adapter = make_adapter()
    moved = BestOf(adapter).migrate(states, None, control, query)
    assert (moved == adapter.migrate(states, None, control, query)).all()


def test_migrations_are_made_by_name() -> None:
    """Names from the configuration; what is unknown or untrained is said."""
    adapter = make_adapter()
    assert {name: make_migration(name, adapter).name for name in MIGRATIONS} == {
        "reuse": "reuse",
        "jacobian": "jacobian",
        "best": "jacobian",
        "adapter": "adapter",
    }
    with pytest.raises(CalibrationError, match="train-adapter"):
        make_migration("adapter")
    with pytest.raises(ConfigError, match="adapter, best, jacobian, reuse"):
        make_migration("magic")


def test_adapter_survives_saving(tmp_path: Path) -> None:
    """A loaded adapter computes the same numbers and counts the same parameters."""
    adapter = make_adapter()
    adapter.save(tmp_path / "adapter.safetensors")
    again = Adapter.load(tmp_path / "adapter.safetensors", "w1")
    states, jacobian, control, query = sample(3)
    expected = adapter.migrate(states, jacobian, control, query)
    assert (again.migrate(states, jacobian, control, query) == expected).all()
    assert again.parameters == 5 * (S + 2 * C) + S * 5


def test_adapter_of_other_weights_is_refused(tmp_path: Path) -> None:
    """An adapter belongs to the weights it was trained for."""
    path = tmp_path / "adapter.safetensors"
    make_adapter(digest="w1").save(path)
    with pytest.raises(CalibrationError, match="trained for weights w1, this model has w2"):
        Adapter.load(path, "w2")
    path.write_bytes(b"not a tensor")
    with pytest.raises(CalibrationError, match="is no adapter"):
        Adapter.load(path, "w1")
    with pytest.raises(CalibrationError):
        Adapter.load(tmp_path / "absent.safetensors", "w1")
