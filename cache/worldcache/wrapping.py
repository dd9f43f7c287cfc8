"""Step reuse for diffusion transformers that others built: `worldcache.wrap(model)`.

    wrapped = worldcache.wrap(pipeline.transformer)
    with wrapped.request(policy, steps=30) as request:
        for t in timesteps:
            with request.branch("prompt"):
                noise = transformer(latents, t, text).sample
            with request.branch("unconditional"):
                ...

The model stays what it is: outside of a request, and after `unwrap`, it computes as ever, and its
weights keep their names. Each branch of each request has scopes of its own, one for each row of the
batch; nothing survives the `with`. Requests in different threads do not see each other.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from worldcache.adapters import Adapter, adapter_for
from worldcache.running import Reuse
from worldcache.steps import Policy, Tally

__all__ = ["Request", "Wrapped", "activity_of", "wrap"]

_GRID = (8, 8)


class Request:
    """One generation. tally: blocks computed and skipped, over all branches."""

    def __init__(self, policy: Policy, steps: int) -> None:
        self.policy = policy
        self.steps = steps
        self._branches: dict[str, tuple[Reuse, int]] = {}
        self._now = ""

    @contextmanager
    def branch(self, name: str) -> Iterator[None]:
        """Calls of the model in here belong to this conditioning branch."""
        before, self._now = self._now, name
        try:
            yield
        finally:
            self._now = before

    @property
    def branches(self) -> dict[str, Reuse]:
        """What was reused so far, by branch."""
        return {name: reuse for name, (reuse, _) in self._branches.items()}

    @property
    def tally(self) -> Tally:
        parts = [reuse.tally for reuse, _ in self._branches.values()]
        return Tally(sum(part.total for part in parts), sum(part.computed for part in parts))

    def next_step(self, rows: int) -> tuple[Reuse, int]:
        """The branch's scopes, and which step this call is; ValueError for one too many."""
        reuse, step = self._branches.get(self._now, (None, 0))
        if reuse is None:
            reuse = Reuse(self.policy, rows, self.steps)
        if reuse.chunks != rows:
            raise ValueError(f"branch {self._now!r} has {reuse.chunks} rows, got {rows}")
        if step == self.steps:
            raise ValueError(
                f"branch {self._now!r} was announced with {self.steps} steps, this is one more; "
                "begin a new request, or name the branches of classifier-free guidance"
            )
        self._branches[self._now] = reuse, step + 1
        return reuse, step


class _Blocks(nn.ModuleList):
    """The model's own blocks; while they may be reused, one that stands for all of them."""

    stack: Callable[[], Callable[..., Tensor] | None]

    def __iter__(self) -> Iterator[Any]:
        stack = self.stack()
        return super().__iter__() if stack is None else iter([stack])


class Wrapped:
    """A model whose `forward` consults a policy while a request is open."""

    def __init__(self, model: nn.Module, adapter: Adapter) -> None:
        blocks = getattr(model, adapter.blocks, None)
        if not isinstance(blocks, nn.ModuleList) or not len(blocks):
            raise ValueError(
                f"{type(model).__name__}.{adapter.blocks} must be a ModuleList with blocks in it"
            )
        if "forward" in vars(model):
            raise ValueError(f"this {type(model).__name__} is wrapped already, or was changed")
        self.model = model
        self.adapter = adapter
        self._blocks = blocks
        self._forward = model.forward
        self._signature = inspect.signature(self._forward)
        self._request: ContextVar[Request | None] = ContextVar("request", default=None)
        self._stack: ContextVar[Callable[..., Tensor] | None] = ContextVar("stack", default=None)
        seen = _Blocks(blocks)
        seen.stack = self._stack.get
        setattr(model, adapter.blocks, seen)
        model.forward = self._called

    @contextmanager
    def request(self, policy: Policy, steps: int) -> Iterator[Request]:
        """A generation of `steps` calls per branch."""
        made = Request(policy, steps)
        token = self._request.set(made)
        try:
            yield made
        finally:
            self._request.reset(token)

    def unwrap(self) -> None:
        """Give the model back as it was."""
        setattr(self.model, self.adapter.blocks, self._blocks)
        vars(self.model).pop("forward", None)

    # -- one call --------------------------------------------------------------------------------

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        request = self._request.get()
        if request is None or request.policy.name == "none":
            return self._forward(*args, **kwargs)
        bound = self._signature.bind(*args, **kwargs)
        given = bound.arguments
        latents: Tensor = given[self.adapter.latents]
        reuse, step = request.next_step(len(latents))
        reuse.tally.total += len(self._blocks) * len(latents)
        if reuse.policy.reuses == "step":
            out = self._whole(reuse, step, latents, given)
        else:
            out = self._inside(reuse, step, latents, given)
        if step == 0 and "activity" in reuse.policy.needs:
            reuse.weigh(activity_of(out["sample"]))
        return out if given.get("return_dict", True) else (out["sample"],)

    def _whole(self, reuse: Reuse, step: int, latents: Tensor, given: dict[str, Any]) -> Any:
        rows = reuse.rows(step, latents, writes=self.adapter.writes)
        reuse.tally.computed += len(self._blocks) * len(rows)
        computed = None
        if rows:
            computed = self._forward(**_of_rows(given, rows, len(latents)))[0]
        sample = reuse.fill(computed)
        return _output(sample)

    def _inside(self, reuse: Reuse, step: int, latents: Tensor, given: dict[str, Any]) -> Any:
        """Everything around the blocks is computed; of them, what must be."""

        def stack(hidden: Tensor, *rest: Any) -> Tensor:
            modulated = None
            if "modulated" in reuse.policy.needs:
                modulated = self.adapter.modulated(self._blocks[0], hidden, rest)
            rows = reuse.rows(step, latents, modulated, self.adapter.writes)
            reuse.tally.computed += len(self._blocks) * len(rows)
            computed = None
            if rows:
                mine = tuple(_rows(value, rows, len(hidden)) for value in rest)
                begun = out = _rows(hidden, rows, len(hidden))
                for block in self._blocks:
                    out = block(out, *mine)
                computed = out - begun
            return hidden + reuse.fill(computed)

        token = self._stack.set(stack)
        try:
            return _output(self._forward(**{**given, "return_dict": False})[0])
        finally:
            self._stack.reset(token)


def wrap(model: nn.Module, adapter: Adapter | None = None) -> Wrapped:
    """Wrap a diffusers transformer in place; without an adapter, that of its class is used."""
    return Wrapped(model, adapter or adapter_for(model))


def _rows(value: Any, rows: list[int], batch: int) -> Any:
    """The rows of what has a batch dimension; everything else as it is."""
    if len(rows) == batch:
        return value
    if isinstance(value, Tensor) and value.ndim and len(value) == batch:
        return value[rows]
    if isinstance(value, tuple | list):
        return type(value)(_rows(item, rows, batch) for item in value)
    return value


def _of_rows(given: dict[str, Any], rows: list[int], batch: int) -> dict[str, Any]:
    chosen = {name: _rows(value, rows, batch) for name, value in given.items()}
    return {**chosen, "return_dict": False}


def activity_of(sample: Tensor) -> Any:
    """How much each row is going to change (B,): root mean square of what the first step says,
    the busiest regions counting most, as a share of the latents' unit scale in 8-bit levels."""
    squares = sample.float().square().flatten(1, -3).mean(1, keepdim=True)
    regions = F.adaptive_avg_pool2d(squares, _GRID).flatten(1)
    busiest = regions.topk(max(1, regions.shape[1] // 4), dim=1).values.mean(1)
    return torch.sqrt(0.5 * (regions.mean(1) + busiest)).cpu().numpy() * 32.0


def _output(sample: Tensor) -> Any:
    """What diffusers models return."""
    from diffusers.models.modeling_outputs import Transformer2DModelOutput

    return Transformer2DModelOutput(sample=sample)
