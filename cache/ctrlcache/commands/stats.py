"""`ctrlcache stats`: what a warm directory holds, and how well it can be trusted and found."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Table

from ctrlcache.commands.common import Json, WarmDirectory, failing_clearly, looking_at, progress_bar
from ctrlcache.couplet import decode
from ctrlcache.errors import CorruptRecord
from ctrlcache.record import owner_of
from ctrlcache.tiers.warm import WarmTier
from ctrlcache.tiers.warm_files import Quarantine, load_uses

__all__ = ["command"]

_BAR = 30
#: Values that count something: bins double, instead of being of one width.
_COUNTS = ("hits", "couplets per cell")


@dataclass
class _Found:
    entries: int = 0
    couplets: int = 0
    sampled: int = 0
    scored: int = 0
    spaces: int = 0
    size_bytes: int = 0
    quarantined: int = 0
    values: dict[str, list[float]] = field(default_factory=dict)


def command(
    warm: WarmDirectory,
    sample: Annotated[
        int, typer.Option(min=1, help="Couplets whose scores are read, drawn at random.")
    ] = 2_000,
    as_json: Json = False,
) -> None:
    """Show what is cached: sizes, histograms of scores, radii, hits, and occupancy of cells."""
    with failing_clearly(), looking_at(warm) as tier, progress_bar("reading") as progress:
        found = _look(tier, warm, sample, progress)
    histograms = {name: _histogram(name, values) for name, values in found.values.items()}
    if as_json:
        report = {name: value for name, value in vars(found).items() if name != "values"}
        typer.echo(json.dumps({**report, "histograms": histograms}))
        return
    console = Console()
    for line in _summary(found):
        console.print(line, highlight=False, soft_wrap=True)
    for name, histogram in histograms.items():
        console.print()
        if histogram["counts"]:
            console.print(_table(name, histogram))
        else:
            console.print(f"{name}: none yet", highlight=False)


def _look(tier: WarmTier, warm: Path, sample: int, progress: Any) -> _Found:
    entries = list(tier.scan())
    couplets = [entry for entry in entries if entry.control is not None]
    hits = {id: hits for id, hits, _ in load_uses(warm)}
    found = _Found(len(entries), len(couplets), size_bytes=tier.stats().size_bytes)
    found.spaces = len({entry.space for entry in couplets})
    found.quarantined = len(Quarantine(warm).load())
    scores: dict[str, list[float]] = {"stability": [], "transferability": []}
    chosen = random.Random(0).sample(couplets, min(sample, len(couplets)))
    for done, entry in enumerate(chosen):
        progress(done, len(chosen))
        payload = tier.get(entry.id)
        try:
            if payload is None:
                continue
            couplet = decode(payload, owner_of(payload), fields=())
        except CorruptRecord:
            continue
        found.sampled += 1
        found.scored += bool(np.isfinite(couplet.transferability))
        scores["stability"].append(couplet.stability)
        scores["transferability"].append(couplet.transferability)
    found.values = {
        **scores,
        "radius": [entry.radius for entry in couplets],
        "hits": [hits.get(entry.id, 0.0) for entry in entries],
    }
    if tier.index is not None:
        found.values["couplets per cell"] = [float(n) for n in tier.index.occupancy()]
    return found


def _summary(found: _Found) -> Iterator[str]:
    mean = found.size_bytes / found.entries if found.entries else 0.0
    yield (
        f"{found.entries} records ({found.couplets} couplets with neighbours, in {found.spaces} "
        f"contexts), {found.size_bytes / 1e6:.1f} MB, {mean / 1e3:.1f} kB each, "
        f"{found.quarantined} in quarantine"
    )
    radii = found.values["radius"]
    if radii:
        yield (
            f"{sum(radius > 0 for radius in radii) / len(radii):.0%} of the couplets answer for "
            f"neighbours; of {found.sampled} that were read, {found.scored} have been scored"
        )
    used = sum(hits > 0 for hits in found.values["hits"])
    if found.entries:
        yield (
            f"{used / found.entries:.0%} of the records were used since they were stored "
            "(saved every five minutes, and when a server ends)"
        )


def _histogram(name: str, values: list[float], bins: int = 10) -> dict[str, Any]:
    """Counts between edges, and median and 90th percentile. Edges are logarithmic where the values
    span decades, and double where they count something."""
    array = np.asarray(values, np.float64)
    array = array[np.isfinite(array)]
    if not array.size:
        return {"edges": [], "counts": []}
    low, high = float(array.min()), float(array.max())
    if low == high:
        edges = np.array([low, high])
    elif name in _COUNTS:
        doubled = [2.0**n for n in range(64) if low < 2.0**n < high]
        edges = np.array([low, *doubled, high])
    elif low > 0 and high / low > 100:
        edges = np.geomspace(low, high, bins + 1)
        edges[0], edges[-1] = low, high
    else:
        edges = np.linspace(low, high, bins + 1)
    counts = np.histogram(array, edges)[0] if low < high else np.array([array.size])
    return {
        "edges": edges.tolist(),
        "counts": counts.astype(float).tolist(),
        "median": float(np.median(array)),
        "p90": float(np.percentile(array, 90)),
    }


def _table(name: str, histogram: dict[str, Any]) -> Table:
    title = f"{name}: median {histogram['median']:.4g}, 90 % below {histogram['p90']:.4g}"
    table = Table(title=title, title_justify="left", show_edge=False)
    for column in ("from", "to", "count", "share"):
        table.add_column(column, justify="right")
    table.add_column("")
    edges, counts = histogram["edges"], histogram["counts"]
    most, total = max(counts), sum(counts)
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        bar = "█" * round(_BAR * count / most) or ("▏" if count else "")
        table.add_row(f"{low:.4g}", f"{high:.4g}", f"{count:.0f}", f"{count / total:.0%}", bar)
    return table
