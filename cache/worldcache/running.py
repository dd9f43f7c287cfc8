"""Carrying out step reuse for the chunks of one request: who computes, and what stands in.

Shape letters: M chunks of the request under one conditioning branch, the first dimension.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from worldcache.steps import Decision, Kind, Measured, Observation, Policy, Scope, Tally

__all__ = ["Reuse"]


class Reuse:
    """Lives as long as one request, and holds everything that is reused in it.

    kinds: class of each chunk's control. controls (M, C): those, where a chunk's history may come
    from another chunk.
    """

    def __init__(
        self,
        policy: Policy,
        chunks: int,
        steps: int,
        kinds: Sequence[Kind] = (),
        controls: ArrayLike | None = None,
    ) -> None:
        self.policy = policy
        self.steps = steps
        self.tally = Tally()
        self.scopes = [Scope(policy) for _ in range(chunks)]
        steady: Sequence[Kind] = ["steady"] * chunks
        self._kinds = kinds or steady
        self._controls = None if controls is None else np.asarray(controls)
        self._activity: NDArray[np.float64] | None = None
        self._seen: list[Observation] = []
        self._newest: Tensor | None = None
        self._older: Tensor | None = None
        self._inputs: Tensor | None = None
        self._modulated: Tensor | None = None
        self._rows: list[int] = []

    @property
    def chunks(self) -> int:
        return len(self.scopes)

    @property
    def computed_steps(self) -> tuple[tuple[int, ...], ...]:
        """Of each chunk, what was computed so far."""
        return tuple(scope.state.computed for scope in self.scopes)

    @property
    def activity(self) -> NDArray[np.float64] | None:
        """(M,), once it is known."""
        return self._activity

    def weigh(self, activity: ArrayLike) -> None:
        """How much each chunk changes (M,), once that is known."""
        self._activity = np.asarray(activity, np.float64)

    def rows(
        self,
        step: int,
        inputs: Tensor,
        modulated: Tensor | None = None,
        writes: frozenset[str] = frozenset(),
    ) -> list[int]:
        """The chunks that must be computed at this step, in order.

        inputs (M, ...) of the step; modulated (M, ...): the first block's modulated input, where
        the policy needs it.
        """
        needs, chunks = self.policy.needs, range(len(self.scopes))
        moved = _mean(inputs - self._inputs) if self._inputs is not None else None
        turned = None
        if modulated is not None and self._modulated is not None:
            before = self._modulated
            turned = _mean(modulated - before) / _mean(before).clip(1e-12)
        self._inputs = inputs if "moved" in needs else None
        self._modulated = modulated
        self._seen, decided = [], list[Decision]()
        for chunk in chunks:
            lender = self._lender(chunk, decided)
            seen = Observation(
                step=step,
                steps=self.steps,
                chunk=chunk,
                kind=self._kinds[chunk],
                control_changed=lender is not None and self._differ(chunk, lender),
                neighbour=lender is not None,
                writes=writes,
                moved=0.0 if moved is None else float(moved[chunk]),
                modulated=None if turned is None else float(turned[chunk]),
                activity=None if self._activity is None else float(self._activity[chunk]),
            )
            self._seen.append(seen)
            decided.append(self.scopes[chunk].decide(seen))
        self._rows = [chunk for chunk in chunks if decided[chunk] == "compute"]
        return self._rows

    def fill(self, computed: Tensor | None) -> Tensor:
        """Results (M, ...) of the step from those of `rows` (len(rows), ...), None without any.

        What is reused never becomes part of what is reused later.
        """
        rows, chunks = self._rows, len(self.scopes)
        if computed is not None and len(rows) == chunks:
            self._learn(computed, computed)
            return computed
        assert self._newest is not None or computed is not None
        if self.policy.reuses == "neighbour":
            assert computed is not None  # the first chunk has nobody to borrow from
            places = np.searchsorted(rows, np.arange(chunks), side="right") - 1
            out = computed[torch.from_numpy(places)]
        else:
            assert self._newest is not None
            out = self._predicted()
            if computed is not None:
                out = out.clone() if out is self._newest else out
                out[rows] = computed
        self._learn(computed, out)
        return out

    # -- parts -----------------------------------------------------------------------------------

    def _lender(self, chunk: int, decided: Sequence[Decision]) -> int | None:
        """The nearest earlier chunk that computes this step."""
        if self.policy.reuses != "neighbour":
            return None
        return next((at for at in reversed(range(chunk)) if decided[at] == "compute"), None)

    def _differ(self, chunk: int, other: int) -> bool:
        if self._controls is None:
            return False
        return not np.array_equal(self._controls[chunk], self._controls[other])

    def _predicted(self) -> Tensor:
        """What each chunk's history promises for this step."""
        assert self._newest is not None
        slopes = [
            self.policy.slope(scope.state, seen)
            for scope, seen in zip(self.scopes, self._seen, strict=True)
        ]
        if self._older is None or not any(slopes):
            return self._newest
        by_row = torch.tensor(slopes, dtype=self._newest.dtype, device=self._newest.device)
        shape = (-1, *(1,) * (self._newest.ndim - 1))
        return torch.addcmul(self._newest, by_row.view(shape), self._newest - self._older)

    def _learn(self, computed: Tensor | None, out: Tensor) -> None:
        """Histories and states after the step."""
        rows = self._rows
        measured: dict[int, Measured] = {row: Measured(0.0) for row in rows}
        if computed is not None and "measured" in self.policy.needs:
            sizes = _mean(computed)
            changes = 0 * sizes if self._newest is None else _mean(computed - self._newest[rows])
            measured = {
                row: Measured(float(size), float(change))
                for row, size, change in zip(rows, sizes, changes, strict=True)
            }
        for chunk, (scope, seen) in enumerate(zip(self.scopes, self._seen, strict=True)):
            if chunk in measured:
                scope.computed(seen, measured[chunk])
            else:
                scope.reused(seen)
        if computed is None:
            return
        if len(rows) == len(self.scopes):
            self._older, self._newest = self._newest, out
        elif self._newest is not None:
            before = self._newest
            self._newest = before.clone()
            self._newest[rows] = computed
            self._older = before.clone() if self._older is None else self._older.clone()
            self._older[rows] = before[rows]
        else:
            self._newest = out


def _mean(x: Tensor) -> NDArray[np.float64]:
    """Mean absolute value of each chunk (M,)."""
    means: NDArray[np.float64] = x.flatten(1).abs().mean(1).double().cpu().numpy()
    return means
