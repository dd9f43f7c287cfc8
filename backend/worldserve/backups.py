"""Backups of the warm directory by the clock, while it is served, and only so many of them."""

from __future__ import annotations

import re
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import CollectorRegistry, Counter, Gauge

from ctrlcache.backup import Backup, backup, read_manifest
from ctrlcache.errors import ConfigError, CtrlCacheError, InvalidInput

__all__ = ["BackupConfig", "Backups", "duration_s", "kept_backups"]

_NAME = re.compile(r"warm-\d{8}-\d{6}(-\d+)?")
_UNITS = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
#: After one that failed.
_AGAIN_S = 300.0


@dataclass(frozen=True)
class BackupConfig:
    """directory: where they lie, each as warm-<UTC time>; hard links need the file system of the
    warm directory. every_s: seconds from one to the next. keep: how many stay."""

    directory: Path
    every_s: float = 86_400.0
    keep: int = 7

    def __post_init__(self) -> None:
        if not self.every_s >= 1:
            raise ConfigError(f"every_s of backups is {self.every_s:g}; expected at least 1")
        if self.keep < 1:
            raise ConfigError(f"keep of backups is {self.keep}; expected at least 1")


class Backups:
    """A thread that makes them. The clock is that of the newest backup, so that a restart of the
    server neither skips one nor makes one more."""

    def __init__(
        self,
        warm: Path,
        config: BackupConfig,
        log: Callable[[str], None],
        registry: CollectorRegistry | None = None,
    ) -> None:
        self._warm = warm
        self._config = config
        self._log = log
        registry = registry or CollectorRegistry()
        self._last = Gauge(
            "ctrlcache_backup_last_success_timestamp_seconds",
            "Unix time of the newest backup, 0 where there is none.",
            registry=registry,
        )
        self._size = Gauge(
            "ctrlcache_backup_size_bytes", "Of the newest backup.", registry=registry
        )
        self._failures = Counter(
            "ctrlcache_backup_failures_total", "Backups that failed.", registry=registry
        )
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="backups", daemon=True)

    def start(self) -> None:
        """ConfigError where the directory cannot be made."""
        try:
            self._config.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"backup directory {str(self._config.directory)!r}: {error.strerror}"
            ) from None
        kept = kept_backups(self._config.directory)
        if kept:
            self._show(read_manifest(kept[0]))
        self._thread.start()

    def close(self) -> None:
        """One that is being made is finished first."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def make(self) -> Path:
        """A backup, now; then those that are too many go."""
        target = _free_name(self._config.directory)
        made = backup(self._warm, target)
        self._show(made)
        self._log(
            f"backup {target}: {made.size_bytes / 1e6:.1f} MB in {made.linked + made.copied} "
            f"segments, {made.copied} of them copied"
        )
        for old in kept_backups(self._config.directory)[self._config.keep :]:
            shutil.rmtree(old, ignore_errors=True)
        return target

    def _run(self) -> None:
        wait_s = self._due_in_s()
        while not self._closed.wait(wait_s):
            try:
                self.make()
                wait_s = self._due_in_s()
            except (CtrlCacheError, OSError) as error:
                self._failures.inc()
                self._log(f"backup failed, the next attempt follows: {error}")
                wait_s = min(_AGAIN_S, self._config.every_s)

    def _due_in_s(self) -> float:
        kept = kept_backups(self._config.directory)
        if not kept:
            return 0.0
        age_s = time.time() - read_manifest(kept[0]).created_s
        # A clock that was set back must not put the next one off for years.
        return min(max(0.0, self._config.every_s - age_s), self._config.every_s)

    def _show(self, made: Backup) -> None:
        self._last.set(made.created_s)
        self._size.set(made.size_bytes)


def kept_backups(directory: Path) -> list[Path]:
    """The complete backups in `directory`, the newest first."""
    found: list[tuple[float, Path]] = []
    for path in directory.glob("warm-*"):
        if _NAME.fullmatch(path.name):
            try:
                found.append((read_manifest(path).created_s, path))
            except InvalidInput:
                continue
    return [path for _, path in sorted(found, reverse=True)]


def duration_s(text: str) -> float:
    """'90s', '30m', '24h' or '7d' -> seconds; ConfigError otherwise."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd])\s*", text)
    if match is None:
        raise ConfigError(f"{text!r} is no duration; expected for example 30m, 24h or 7d")
    return float(match[1]) * _UNITS[match[2]]


def _free_name(directory: Path) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    names = [f"warm-{stamp}", *(f"warm-{stamp}-{n}" for n in range(1, 1000))]
    return next(directory / name for name in names if not (directory / name).exists())
