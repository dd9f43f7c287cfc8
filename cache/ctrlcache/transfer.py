"""Migration: from a cached couplet's states to the states at a neighbouring control.

All migrations broadcast over leading dimensions, so that one call moves one couplet or a thousand.
Shapes: states (..., H, S), jacobian (..., H, S, C), control and query (..., C). H steps, S state
dimensions, C control axes; `jacobian` is d(state)/d(control) at the couplet's control.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ctrlcache.errors import CalibrationError, ConfigError, InvalidInput

__all__ = [
    "MIGRATIONS",
    "Adapter",
    "BestOf",
    "Jacobian",
    "Migration",
    "Reuse",
    "adapter_inputs",
    "make_migration",
]

Float = NDArray[np.float32]
AnyFloat = NDArray[np.floating[Any]]


class Migration(Protocol):
    """How states move with the control."""

    @property
    def name(self) -> str:
        """What a calibrated bound holds for: migrations of one name give the same answers."""
        ...

    def migrate(
        self, states: AnyFloat, jacobian: AnyFloat | None, control: AnyFloat, query: AnyFloat
    ) -> Float:
        """States (..., H, S) float32 predicted for `query`."""
        ...


@dataclass(frozen=True)
class Reuse:
    """The couplet's states as they are: zeroth order."""

    name: str = field(default="reuse", init=False)

    def migrate(
        self, states: AnyFloat, jacobian: AnyFloat | None, control: AnyFloat, query: AnyFloat
    ) -> Float:
        shape = np.broadcast_shapes(
            states.shape, (*np.shape(control)[:-1], 1, 1), (*np.shape(query)[:-1], 1, 1)
        )
        return np.broadcast_to(states, shape).astype(np.float32)


@dataclass(frozen=True)
class Jacobian:
    """First order: states + J (query - control), over the whole trajectory."""

    name: str = field(default="jacobian", init=False)

    def migrate(
        self, states: AnyFloat, jacobian: AnyFloat | None, control: AnyFloat, query: AnyFloat
    ) -> Float:
        """InvalidInput where the couplet has no Jacobian (it was never scored)."""
        if jacobian is None:
            raise InvalidInput("first-order migration needs the couplet's Jacobian, got none")
        delta = np.subtract(query, control, dtype=np.float32)  # (..., C)
        slope = np.asarray(jacobian, dtype=np.float32)
        change = np.matmul(slope, delta[..., None, :, None])[..., 0]  # (..., H, S)
        return np.add(states, change, dtype=np.float32)


@dataclass(frozen=True)
class BestOf:
    """First order where a couplet has its Jacobian, another migration where it was never scored.

    In every measurement so far first order beat the adapters on every suite and at every distance
    (docs/trust.md), so what is best for a couplet is decided by what the couplet brings. Couplets
    that were never scored have no bound, so within a budget the answers are those of first order,
    and so is the name.
    """

    otherwise: Migration
    first_order: Jacobian = field(default_factory=Jacobian)
    name: str = field(default=Jacobian.name, init=False)

    def migrate(
        self, states: AnyFloat, jacobian: AnyFloat | None, control: AnyFloat, query: AnyFloat
    ) -> Float:
        chosen: Migration = self.otherwise if jacobian is None else self.first_order
        return chosen.migrate(states, jacobian, control, query)


def adapter_inputs(standard: AnyFloat, delta: AnyFloat) -> Float:
    """What the adapter reads: standardised states (..., H, S) and control change (..., C).

    Returns (..., H, S + 2 C): the state, the change, and the change weighted with the share of the
    horizon during which it has acted; without the latter the adapter cannot tell a first step from
    a last one.
    """
    horizon = standard.shape[-2]
    acted = np.arange(1, horizon + 1, dtype=np.float32)[:, None] / horizon  # (H, 1)
    change = np.broadcast_to(delta[..., None, :], (*standard.shape[:-1], delta.shape[-1]))
    return np.concatenate([standard, change, change * acted], axis=-1, dtype=np.float32)


@dataclass(frozen=True, eq=False)
class Adapter:
    """The state transfer adapter: a residual two-layer perceptron without bias.

    s_j = s_i + scale * (f(s_i, c_j - c_i) - f(s_i, 0)), f(x) = outer @ tanh(inner @ x). Subtracting
    f(s_i, 0) costs nothing but a second column of hidden units and makes the migration to one's own
    control exact. inner (hidden, S + 2 C), outer (S, hidden), scale (S,): state_scale of the model.
    """

    inner: Float
    outer: Float
    scale: Float
    weights_digest: str
    name: str = field(default="adapter", init=False)

    @property
    def parameters(self) -> int:
        return int(self.inner.size + self.outer.size)

    def migrate(
        self, states: AnyFloat, jacobian: AnyFloat | None, control: AnyFloat, query: AnyFloat
    ) -> Float:
        delta = np.subtract(query, control, dtype=np.float32)  # (..., C)
        dims = self.scale.size
        shape = np.broadcast_shapes(states.shape, (*delta.shape[:-1], 1, 1))
        base = np.broadcast_to(states, shape).astype(np.float32)  # (..., H, S)
        x = adapter_inputs(base * self._inverse(), delta)  # (..., H, S + 2 C)
        still = x[..., :dims] @ self.inner[:, :dims].T  # (..., H, hidden)
        moved = still + x[..., dims:] @ self.inner[:, dims:].T
        change = (np.tanh(moved) - np.tanh(still)) @ self.outer.T  # (..., H, S)
        moved_states: Float = base + change * self.scale
        return moved_states

    def _inverse(self) -> Float:
        return np.divide(1.0, self.scale, out=np.zeros_like(self.scale), where=self.scale > 0)

    def save(self, path: Path) -> None:
        """Write a safetensors file that carries the digest of the model's weights."""
        from safetensors.numpy import save_file

        tensors = {"inner": self.inner, "outer": self.outer, "scale": self.scale}
        save_file(
            {k: np.ascontiguousarray(v, dtype=np.float32) for k, v in tensors.items()},
            path,
            metadata={"kind": "state-transfer-adapter", "weights_digest": self.weights_digest},
        )

    @classmethod
    def load(cls, path: Path, weights_digest: str) -> Adapter:
        """CalibrationError if it is absent, unreadable or was trained for other weights."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="np") as stored:
                found = (stored.metadata() or {}).get("weights_digest")
                inner, outer, scale = (stored.get_tensor(k) for k in ("inner", "outer", "scale"))
        except (OSError, SafetensorError) as error:
            raise CalibrationError(f"{path} is no adapter: {error}") from error
        if found != weights_digest:
            raise CalibrationError(
                f"{path} was trained for weights {found}, this model has {weights_digest}; "
                "train it again with `worldserve train-adapter`"
            )
        if outer.shape != (scale.size, inner.shape[0]) or inner.shape[1] <= scale.size:
            raise CalibrationError(
                f"{path} holds shapes {inner.shape}, {outer.shape}, {scale.shape}, which do not fit"
            )
        return cls(inner, outer, scale, weights_digest)


MIGRATIONS = ("adapter", "best", "jacobian", "reuse")


def make_migration(name: str, adapter: Adapter | None = None) -> Migration:
    """The migration called `name`, one of MIGRATIONS.

    `best` takes first order where it can, else the adapter, else plain reuse. ConfigError for an
    unknown name, CalibrationError where an adapter is asked for and there is none.
    """
    if name == "reuse":
        return Reuse()
    if name == "jacobian":
        return Jacobian()
    if name == "best":
        return BestOf(adapter or Reuse())
    if name != "adapter":
        raise ConfigError(f"migration must be one of {', '.join(MIGRATIONS)}, got {name!r}")
    if adapter is None:
        raise CalibrationError(
            "migration 'adapter' needs a trained adapter; train it with `worldserve train-adapter`"
        )
    return adapter
