"""What to load before it is asked for: from a prompt to what sessions like it needed.

A *recipe* is what one session needed at its start, under its prompt. Asked to warm up for a prompt,
the recipes whose prompts mean the same are chosen; where none does, `fallback_policy` says what
happens instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np

from ctrlcache.errors import ConfigError
from worldcache.prompts import Sentences, phrases

__all__ = ["Choice", "Recipe", "WarmupConfig", "choose"]

T = TypeVar("T")
STRATEGIES = ("semantic", "recent", "none")
FALLBACKS = ("partial_load", "full_load", "skip")


@dataclass(frozen=True)
class WarmupConfig:
    """prefetch_strategy: `semantic` chooses recipes by what the prompt means, `recent` the newest
    ones whatever the prompt, `none` loads nothing. warmup_steps: recipes loaded, at most, and steps
    the model is run ahead with. adaptive_threshold: similarity from which two prompts mean the
    same. fallback_policy, for a prompt that is like no other: `partial_load` loads half of
    warmup_steps, the most alike first; `full_load` all recipes; `skip` none."""

    prefetch_strategy: str = "semantic"
    warmup_steps: int = 8
    adaptive_threshold: float = 0.75
    fallback_policy: str = "partial_load"

    def __post_init__(self) -> None:
        for name, known in (("prefetch_strategy", STRATEGIES), ("fallback_policy", FALLBACKS)):
            if getattr(self, name) not in known:
                raise ConfigError(
                    f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}"
                )
        if not 0 <= self.warmup_steps <= 1_000:
            raise ConfigError(f"warmup_steps must be 0 to 1000, got {self.warmup_steps}")
        if not 0 < self.adaptive_threshold <= 1:
            raise ConfigError(
                f"adaptive_threshold must be above 0, at most 1, got {self.adaptive_threshold}"
            )


@dataclass(frozen=True)
class Recipe(Generic[T]):
    """needs: whatever its loader understands. used_s: Unix time."""

    prompt: str
    used_s: float
    needs: T


@dataclass(frozen=True)
class Choice(Generic[T]):
    """how: `semantic`, `recent`, `none`, or the fallback policy that was taken. similarity: of the
    best recipe, up to 1, 0 where there is none."""

    recipes: tuple[Recipe[T], ...]
    how: str
    similarity: float


def choose(
    prompt: str, recipes: Sequence[Recipe[T]], embed: Sentences, config: WarmupConfig
) -> Choice[T]:
    """Which recipes to load for a prompt, in the order of loading."""
    newest = sorted(recipes, key=lambda recipe: -recipe.used_s)
    if config.prefetch_strategy == "none" or not newest:
        return Choice((), "none", 0.0)
    if config.prefetch_strategy == "recent":
        return Choice(tuple(newest[: config.warmup_steps]), "recent", 0.0)
    parts = phrases(prompt) or [""]
    ours = embed([prompt, *parts])
    theirs = embed([recipe.prompt for recipe in newest])
    # A prompt of several phrases needs what sessions of each of them needed.
    alike = (ours @ theirs.T).max(0)  # (recipes,)
    order = np.argsort(-alike, kind="stable")
    best = float(alike[order[0]])
    close = [newest[i] for i in order if alike[i] >= config.adaptive_threshold]
    if close:
        return Choice(tuple(close[: config.warmup_steps]), "semantic", best)
    if config.fallback_policy == "skip":
        return Choice((), "skip", best)
    most = len(newest) if config.fallback_policy == "full_load" else -(-config.warmup_steps // 2)
    return Choice(tuple(newest[i] for i in order[:most]), config.fallback_policy, best)
