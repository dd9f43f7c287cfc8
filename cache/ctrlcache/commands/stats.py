"""`ctrlcache stats`: what a warm directory holds, and how well it can be trusted and found."""

from __future__ import annotations

import json
import random
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


@dataclass
class _Found:
    entries: int = 0
    couplets: int = 0
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
    histograms = {name: _histogram(values) for name, values in found.values.items() if values}
    if as_json:
        report = {
            "entries": found.entries,
            "couplets": found.couplets,
            "size_bytes": found.size_bytes,
            "quarantined": found.quarantined,
            "histograms": histograms,
        }
        typer.echo(json.dumps(report))
        return
    console = Console()
    console.print(
        f"{found.entries} records ({found.couplets} couplets with neighbours), "
        f"{found.size_bytes / 1e6:.1f} MB, {found.quarantined} in quarantine",
        highlight=False,
    )
    for name, histogram in histograms.items():
        console.print(_table(name, histogram))


def _look(tier: WarmTier, warm: Path, sample: int, progress: Any) -> _Found:
    entries = list(tier.scan())
    couplets = [entry for entry in entries if entry.control is not None]
    hits = {id: hits for id, hits, _ in load_uses(warm)}
    found = _Found(len(entries), len(couplets), tier.stats().size_bytes)
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


def _histogram(values: list[float], bins: int = 10) -> dict[str, list[float]]:
    """Counts between edges; edges are logarithmic where the values span decades."""
    array = np.asarray(values, np.float64)
    array = array[np.isfinite(array)]
    if not array.size:
        return {"edges": [], "counts": []}
    low, high = float(array.min()), float(array.max())
    if low == high:
        return {"edges": [low, high], "counts": [float(array.size)]}
    if low > 0 and high / low > 100:
        edges = np.geomspace(low, high, bins + 1)
    else:
        edges = np.linspace(low, high, bins + 1)
    edges[0], edges[-1] = low, high
    counts, _ = np.histogram(array, edges)
    return {"edges": edges.tolist(), "counts": counts.astype(float).tolist()}


def _table(name: str, histogram: dict[str, list[float]]) -> Table:
    table = Table("from", "to", "count", "", title=name, title_justify="left", show_edge=False)
    edges, counts = histogram["edges"], histogram["counts"]
    most = max(counts, default=1.0)
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        bar = "█" * round(_BAR * count / most)
        table.add_row(f"{low:.4g}", f"{high:.4g}", f"{count:.0f}", bar)
    return table
