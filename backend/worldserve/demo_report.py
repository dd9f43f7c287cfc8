"""The demo's tables: one live row per interaction, and the summary."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.console import Console
from rich.table import Table

from worldserve.demo_checks import Played, Step, Summary
from worldserve.demo_script import Interaction
from worldserve.sequence_client import Reply

__all__ = ["interaction_table", "print_summary"]

_TIERS = {"hot": "green", "warm": "yellow", "cold": "blue", "none": "dim"}
_WIDE = 110  # columns of a terminal that holds every column of the table


def interaction_table(
    title: str,
    interactions: Sequence[Interaction],
    cached: Sequence[Reply],
    plain: Sequence[Reply],
    width: int,
) -> Table:
    """Rows appear as answers come: first the cached session's, then its twin's beside them."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 1))
    table.add_column("#", justify="right", style="dim")
    table.add_column("kind")
    if width >= _WIDE:
        table.add_column("control x y z grip", justify="right")
    table.add_column("ms", justify="right", style="bold")
    if width >= _WIDE:
        table.add_column("encode+look up+predict+draw", justify="right", style="dim")
    table.add_column("tier")
    table.add_column("answer")
    table.add_column("cache=off", justify="right")
    table.add_column("saved", justify="right")
    for number, (interaction, answer) in enumerate(zip(interactions, cached, strict=False), 1):
        twin = plain[number - 1] if number <= len(plain) else None
        row = [str(number), interaction.kind]
        if width >= _WIDE:
            row.append(" ".join(f"{value:+.2f}" for value in interaction.samples[-1]))
        row.append(f"{answer.latency_ms:.1f}")
        if width >= _WIDE:
            row.append(
                " ".join(
                    f"{answer.stage_ms(name):6.1f}"
                    for name in ("encode", "lookup", "dynamics", "decode")
                )
            )
        row += [
            f"[{_TIERS.get(answer.tier, 'red')}]{answer.tier}[/]",
            "exact" if answer.exact else f"≈ within {answer.bound:.3f}",
            f"{twin.latency_ms:.1f}" if twin else "",
            f"{twin.latency_ms / answer.latency_ms:.1f}×" if twin else "",
        ]
        table.add_row(*row)
    return table


def print_summary(
    console: Console, summary: Summary, played: Sequence[Played], pause_s: float, budget: float
) -> None:
    cached, plain = summary.cached, summary.plain
    console.print()
    latency = Table(box=None, padding=(0, 2))
    for name in ("latency, ms", "CtrlCache", "cache=off", "ratio"):
        latency.add_column(name, justify="left" if name == "latency, ms" else "right")
    for name in ("p50", "p99", "total"):
        ours, twin = (getattr(which, f"{name}_ms") for which in (cached, plain))
        latency.add_row(name, f"{ours:.1f}", f"{twin:.1f}", f"[bold]{twin / ours:.2f}×[/]")
    for kind, steps in _by_kind(played).items():
        ours = float(np.median([step.cached.latency_ms for step in steps]))
        twin = float(np.median([step.plain.latency_ms for step in steps]))
        name = f"  {kind}, median of {len(steps)}"
        latency.add_row(name, f"{ours:.1f}", f"{twin:.1f}", f"{twin / ours:.2f}×", style="dim")
    console.print(latency)
    console.print()
    facts = Table(box=None, show_header=False, padding=(0, 2))
    for name, text in _facts(summary, pause_s, budget):
        facts.add_row(name, text)
    console.print(facts)


def _facts(summary: Summary, pause_s: float, budget: float) -> list[tuple[str, str]]:
    tiers = ", ".join(
        f"{summary.tiers[tier]} {'computed' if tier == 'none' else tier}"
        for tier in ("hot", "warm", "cold", "none")
        if tier in summary.tiers
    )
    approximate = len(summary.errors)
    facts = [
        ("interactions", f"{summary.interactions}, with {pause_s:g} s to think after each"),
        ("answered from", tiers),
        (
            "exact",
            f"{summary.exact}, {summary.exact_same} of them bit-equal to cache=off, frames too",
        ),
        ("approximate", f"{approximate} (allowed: a state error of {budget:g})"),
    ]
    if approximate:
        facts += [
            (
                "their error",
                f"measured against cache=off: mean {np.mean(summary.errors):.4f}, worst "
                f"{max(summary.errors):.4f}; worst bound stated {max(summary.bounds):.4f}; "
                f"{summary.over_bound} over their bound (5 % may be)",
            )
        ]
    first, second = sum(summary.encode_first_ms), sum(summary.encode_second_ms)
    facts += [
        (
            "same clip again",
            f"a second session spent {second:.1f} ms on encoding where the first spent "
            f"{first:.1f} ms: {100 * (1 - second / first) if first else 0:.0f} % saved",
        ),
        (
            "memory",
            f"in the end both sessions predict the same, to the bit, on {summary.memory_same} of "
            f"{len(summary.encode_first_ms)} clips",
        ),
        (
            "predicted frames",
            f"PSNR {summary.psnr_db:.1f} dB over the next 0.8 s of the clips, "
            f"{summary.psnr_copy_db:.1f} dB for the last frame copied",
        ),
    ]
    return facts


def _by_kind(played: Sequence[Played]) -> dict[str, list[Step]]:
    kinds: dict[str, list[Step]] = {}
    for scene in played:
        for step in scene.steps:
            kinds.setdefault(step.interaction.kind, []).append(step)
    return kinds
