"""Reuse between the steps of one generation: the small interface that every policy is written to.

A *scope* is one chunk (a frame, or a group of frames drawn together) of one request under one
conditioning branch. Before each step the model asks the scope of each chunk whether to compute it
or to reuse what it has. Three rules hold for every policy, and are kept here and not by them:

- a policy is frozen and pure: `decide` looks, `follow` returns the next state, neither changes
  anything. So two requests can never meet in a policy;
- force points outrank similarity: the first and the last step, a control other than the one the
  history was made under, and a step that writes something which the policy may not skip;
- a reused step never feeds the history: `Measured` exists only for what was computed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

__all__ = [
    "Decision",
    "Kind",
    "Measured",
    "Observation",
    "Policy",
    "Reuses",
    "Scope",
    "State",
    "Tally",
    "forced",
]

Decision = Literal["compute", "reuse"]
#: What stands for a skipped evaluation: what the blocks added at the last computed step; the
#: whole step's output then; or what the blocks added in an earlier chunk at this step.
Reuses = Literal["blocks", "step", "neighbour"]
#: What the controls alone say of a chunk.
Kind = Literal["initial", "transition", "turning", "steady"]


@dataclass(frozen=True, slots=True)
class Observation:
    """What is known of one chunk before one step; nothing here needs the step itself.

    step of `steps`, chunk: counted from 0. kind: class of its control. control_changed: the control
    is another than the one that what would be reused was made under. neighbour: an earlier chunk of
    the request has computed this very step. writes: names of what evaluating the step writes
    beside its output, a key-value cache for instance. moved: mean absolute change of the input
    since the step before. modulated: relative change of the first block's modulated input since the
    step before, None where it was not looked at. activity: how much the chunk changes, weighted by
    content (`worldcache.weights`), None until the first step tells.
    """

    step: int
    steps: int
    chunk: int = 0
    kind: Kind = "steady"
    control_changed: bool = False
    neighbour: bool = False
    writes: frozenset[str] = frozenset()
    moved: float = 0.0
    modulated: float | None = None
    activity: float | None = None


@dataclass(frozen=True, slots=True)
class Measured:
    """What a computed step showed: mean absolute size of its output, and change against the last
    computed one, 0 for the first."""

    size: float
    change: float = 0.0


@dataclass(frozen=True, slots=True)
class State:
    """All that a scope remembers for its policy. computed: steps, oldest first. drift: what the
    policy has summed up since the last of them. travelled: of the input since then. rate: change
    of the output for that of the input. size: of the output."""

    computed: tuple[int, ...] = ()
    drift: float = 0.0
    travelled: float = 0.0
    rate: float | None = None
    size: float = 0.0


class Policy(Protocol):
    """Decides for one scope. Implementations are frozen dataclasses.

    needs: what has to be looked at for its sake, of `moved`, `modulated`, `measured`, `activity`.
    """

    @property
    def name(self) -> str: ...

    @property
    def needs(self) -> frozenset[str]: ...

    @property
    def reuses(self) -> Reuses: ...

    @property
    def may_skip(self) -> frozenset[str]:
        """Names of the writes that may be left out where a step is reused."""
        ...

    def decide(self, state: State, seen: Observation) -> Decision: ...

    def follow(self, state: State, seen: Observation, measured: Measured | None) -> State:
        """The state after the step; measured: None where it was reused."""
        ...

    def slope(self, state: State, seen: Observation) -> float:
        """How far to go on from the last two computed outputs: 0 holds the last one, 1 goes on as
        far again as they are apart."""
        ...


def forced(policy: Policy, state: State, seen: Observation) -> bool:
    """Whether the step must be computed, whatever the policy thinks of it."""
    outer = seen.step in (0, seen.steps - 1) or not state.computed
    return outer or seen.control_changed or bool(seen.writes - policy.may_skip)


@dataclass(eq=False)
class Scope:
    """The state of one chunk of one request and branch, and the only thing that changes."""

    policy: Policy
    state: State = field(default_factory=State)

    def decide(self, seen: Observation) -> Decision:
        if forced(self.policy, self.state, seen):
            return "compute"
        return self.policy.decide(self.state, seen)

    def reused(self, seen: Observation) -> None:
        self.state = self.policy.follow(self.state, seen, None)

    def computed(self, seen: Observation, measured: Measured) -> None:
        state = self.policy.follow(self.state, seen, measured)
        self.state = replace(state, computed=(*self.state.computed, seen.step))

    def reset(self) -> None:
        """Forget everything: a new request begins."""
        self.state = State()


@dataclass(eq=False)
class Tally:
    """Block evaluations of one generation: how many there would be, and how many there were."""

    total: int = 0
    computed: int = 0

    @property
    def skipped(self) -> float:
        """Share of block evaluations that were not done."""
        return 1 - self.computed / self.total if self.total else 0.0
