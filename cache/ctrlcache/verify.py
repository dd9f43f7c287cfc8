"""Reading every byte of a warm directory, independent of any index."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from ctrlcache.errors import InvalidInput
from ctrlcache.tiers import segments
from ctrlcache.tiers.segment_scan import Damage, scan

__all__ = ["Report", "verify"]

#: (bytes read, of all)
Progress = Callable[[int, int], None]


@dataclass
class Report:
    """records: intact ones, dead ones among them. tombstones: deletions. unfinished: tails of
    interrupted writes, no damage."""

    segments: int = 0
    sealed: int = 0
    records: int = 0
    tombstones: int = 0
    size_bytes: int = 0
    unfinished: int = 0
    damage: list[Damage] = field(default_factory=list)


def verify(directory: str | Path, progress: Progress | None = None) -> Report:
    """Check every checksum of every segment. A server may go on writing meanwhile; what it adds
    after the call is not looked at. InvalidInput where there is no such directory."""
    directory = Path(directory)
    if not directory.is_dir():
        raise InvalidInput(f"{directory} is no directory")
    found = segments.list_segments(directory)
    report = Report()
    done, total = 0, sum(found.values())
    for number, size in found.items():
        try:
            fd = os.open(segments.segment_path(directory, number), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # compacted away meanwhile
        try:
            _segment(fd, number, size, report)
        finally:
            os.close(fd)
        done += size
        if progress is not None:
            progress(done, total)
    return report


def _segment(fd: int, number: int, size: int, report: Report) -> None:
    footer = segments.read_footer(fd, number, size)
    report.segments += 1
    report.size_bytes += size
    end = size
    if footer is not None:
        report.sealed += 1
        end = footer.end
        if footer.damaged:
            reason = "footer checksum is wrong"
            report.damage.append(Damage(number, footer.end, size, reason, True, False))
    for item in scan(fd, number, 0, end, verify_payload=True):
        if isinstance(item, Damage):
            if item.cut and item.torn and footer is None:
                report.unfinished += 1
            else:
                report.damage.append(item)
        elif item.tombstone:
            report.tombstones += 1
        else:
            report.records += 1
