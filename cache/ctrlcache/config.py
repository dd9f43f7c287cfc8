"""Settings of the cache, checked once, where they are built.

They come from a mapping of strings (the parameters of a Triton model), from a TOML file with one
table per section, or from Python. Keys of a mapping are `<section>_<field>`, for instance
`hot_size_bytes`, and `shm_dir`, which places everything in shared memory. Secrets are never among
them: the cold tier's come from a file or from the environment.
"""

from __future__ import annotations

import json
import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

from ctrlcache.errors import ConfigError
from ctrlcache.eviction import POLICIES

__all__ = [
    "CacheConfig",
    "ColdConfig",
    "FlushConfig",
    "HotConfig",
    "PrefetchConfig",
    "TraceConfig",
    "TrustConfig",
    "WarmConfig",
]

MIB, GIB = 1 << 20, 1 << 30
_SHM = Path("/dev/shm/ctrlcache")
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)


@dataclass(frozen=True)
class HotConfig:
    """directory: in shared memory, the same for all instances of a server. size_bytes: of its
    file, all in all. eviction: a policy of `ctrlcache.eviction`."""

    directory: Path = _SHM / "hot"
    size_bytes: int = 2 * GIB
    eviction: str = "cost"

    def __post_init__(self) -> None:
        _at_least("hot", "size_bytes", self.size_bytes, 16 * MIB)
        _one_of("hot", "eviction", self.eviction, tuple(POLICIES))


@dataclass(frozen=True)
class WarmConfig:
    """dir: on NVMe; None goes without a warm tier. index_directory: in shared memory, one per
    server, at most index_bytes. durable: a flush waits for the disk itself."""

    dir: Path | None = None
    index_directory: Path = _SHM / "warm-index"
    size_bytes: int = 20 * GIB
    index_bytes: int = 4 * GIB
    segment_bytes: int = 64 * MIB
    durable: bool = True
    eviction: str = "cost"

    def __post_init__(self) -> None:
        _at_least("warm", "size_bytes", self.size_bytes, 16 * MIB)
        _at_least("warm", "index_bytes", self.index_bytes, MIB)
        _at_least("warm", "segment_bytes", self.segment_bytes, MIB)
        _one_of("warm", "eviction", self.eviction, tuple(POLICIES))


@dataclass(frozen=True)
class ColdConfig:
    """endpoint: host:port of MinIO or S3; "" goes without a cold tier. credentials_file: JSON
    {"access_key", "secret_key"} of mode 0600; without it, CTRLCACHE_S3_ACCESS_KEY and
    CTRLCACHE_S3_SECRET_KEY. ca_file: certificates to trust instead of the system's. timeout_s: for
    each wait of the background. min_confidence: of the task, below which nothing is loaded."""

    endpoint: str = ""
    tls: bool = True
    bucket: str = "ctrlcache-templates"
    credentials_file: Path | None = None
    ca_file: Path | None = None
    timeout_s: float = 5.0
    min_confidence: float = 0.9

    def __post_init__(self) -> None:
        if self.endpoint and not re.fullmatch(r"[\w.\-\[\]:]+:\d+", self.endpoint):
            raise ConfigError(f"cold endpoint must be host:port, got {self.endpoint!r}")
        if not re.fullmatch(r"[a-z0-9][a-z0-9.\-]{1,61}[a-z0-9]", self.bucket):
            raise ConfigError(f"cold bucket must be a bucket's name, got {self.bucket!r}")
        _at_least("cold", "timeout_s", self.timeout_s, 0.01)
        if not 0 <= self.min_confidence <= 1:
            raise ConfigError(f"cold min_confidence must be 0 to 1, got {self.min_confidence}")

    def credentials(self) -> tuple[str, str]:
        """(access key, secret key); ConfigError where they are missing or readable by others."""
        path = self.credentials_file
        if path is None:
            try:
                return (
                    os.environ["CTRLCACHE_S3_ACCESS_KEY"],
                    os.environ["CTRLCACHE_S3_SECRET_KEY"],
                )
            except KeyError as error:
                raise ConfigError(
                    f"cold credentials: set {error.args[0]}, or give cold_credentials_file"
                ) from None
        try:
            mode = path.stat().st_mode & 0o777
            if mode & 0o077:
                raise ConfigError(
                    f"cold credentials_file {path} can be read by others (mode {mode:03o}); "
                    f"chmod 600 it"
                )
            content = json.loads(path.read_text())
            return str(content["access_key"]), str(content["secret_key"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"cold credentials_file {path} must be JSON with access_key and secret_key: "
                f"{type(error).__name__}"
            ) from None


@dataclass(frozen=True)
class FlushConfig:
    """Hot records go to the warm tier every interval_s, or as soon as `couplets` wait, whichever
    comes first. Those that wait are not evicted, up to max_share of the hot tier."""

    interval_s: float = 30.0
    couplets: int = 128
    max_share: float = 0.25

    def __post_init__(self) -> None:
        _at_least("flush", "interval_s", self.interval_s, 0.01)
        _at_least("flush", "couplets", self.couplets, 1)
        if not 0 < self.max_share <= 0.5:
            raise ConfigError(f"flush max_share must be above 0, at most 0.5, got {self.max_share}")


@dataclass(frozen=True)
class PrefetchConfig:
    """buffer_size: bytes of neighbours that one hit in the warm tier may bring into the hot one
    (512 MB suits a SATA disk); 0 switches prefetching off."""

    buffer_size: int = 2 * GIB

    def __post_init__(self) -> None:
        _at_least("prefetch", "buffer_size", self.buffer_size, 0)


@dataclass(frozen=True)
class TrustConfig:
    """policy: `trust` or `fixed` (`ctrlcache.admission`). max_error: the largest budget that is
    served, which sets the radius couplets are filed under. migration: how a neighbour's states
    move to the query: `jacobian`, `reuse`, `adapter` or `best`."""

    policy: str = "trust"
    max_error: float = 0.05
    migration: str = "jacobian"

    def __post_init__(self) -> None:
        _one_of("trust", "policy", self.policy, ("trust", "fixed"))
        _one_of("trust", "migration", self.migration, ("jacobian", "reuse", "adapter", "best"))
        _at_least("trust", "max_error", self.max_error, 0)


@dataclass(frozen=True)
class TraceConfig:
    """file: where to record what is asked and stored (`ctrlcache.trace`), for replays; it grows by
    some 150 bytes per look-up. None records nothing."""

    file: Path | None = None


@dataclass(frozen=True)
class CacheConfig:
    """All of it."""

    hot: HotConfig = field(default_factory=HotConfig)
    warm: WarmConfig = field(default_factory=WarmConfig)
    cold: ColdConfig = field(default_factory=ColdConfig)
    flush: FlushConfig = field(default_factory=FlushConfig)
    prefetch: PrefetchConfig = field(default_factory=PrefetchConfig)
    trust: TrustConfig = field(default_factory=TrustConfig)
    trace: TraceConfig = field(default_factory=TraceConfig)

    @classmethod
    def from_mapping(cls, values: Mapping[str, str]) -> CacheConfig:
        """From strings. ConfigError names a key that is unknown or malformed, and what is right."""
        sections: dict[str, dict[str, Any]] = {item.name: {} for item in fields(cls)}
        if "shm_dir" in values:
            shm = Path(values["shm_dir"])
            sections["hot"]["directory"] = shm / "hot"
            sections["warm"]["index_directory"] = shm / "warm-index"
        for key, text in values.items():
            if key == "shm_dir":
                continue
            section, _, name = key.partition("_")
            if section not in sections:
                raise ConfigError(_unknown(key))
            sections[section][name] = text
        return cls._build(sections)

    @classmethod
    def from_file(cls, path: Path | str) -> CacheConfig:
        """From a TOML file: tables `[hot]`, `[warm]` and so on."""
        try:
            tables = tomllib.loads(Path(path).read_text())
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise ConfigError(f"cannot read the configuration {path}: {error}") from error
        known = {item.name for item in fields(cls)}
        for name, table in tables.items():
            if name not in known or not isinstance(table, dict):
                raise ConfigError(
                    f"{path}: {name!r} is no table of the configuration; expected "
                    + ", ".join(f"[{section}]" for section in sorted(known))
                )
        return cls._build(tables)

    @classmethod
    def _build(cls, sections: Mapping[str, Mapping[str, Any]]) -> CacheConfig:
        kinds = get_type_hints(cls)
        built = {}
        for section, values in sections.items():
            hints = get_type_hints(kinds[section])
            arguments = {}
            for name, value in values.items():
                if name not in hints:
                    raise ConfigError(_unknown(f"{section}_{name}"))
                arguments[name] = _parse(f"{section}_{name}", value, hints[name])
            built[section] = kinds[section](**arguments)
        return cls(**built)


def _unknown(key: str) -> str:
    if "secret" in key or "access" in key:
        return f"{key!r} may not be given here: use cold_credentials_file or the environment"
    known = [
        f"{section}_{item.name}"
        for section, kind in get_type_hints(CacheConfig).items()
        for item in fields(kind)
    ]
    return f"unknown setting {key!r}; there are shm_dir, {', '.join(known)}"


def _parse(key: str, value: Any, kind: Any) -> Any:
    """`value`, a string or what TOML made of it, as `kind`."""
    if isinstance(kind, UnionType):  # Path | None
        return None if value == "" else Path(value)
    if kind is Path and isinstance(value, str | Path) and value != "":
        return Path(value)
    if kind is bool:
        if isinstance(value, bool):
            return value
        if str(value).lower() in ("true", "false", "1", "0"):
            return str(value).lower() in ("true", "1")
        raise ConfigError(f"{key} must be true or false, got {value!r}")
    if kind is str and isinstance(value, str):
        return value
    if kind is int:
        return _integer(key, value)
    if kind is float and not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError):
            pass
    wanted = kind.__name__ if isinstance(kind, type) else get_args(kind)
    raise ConfigError(f"{key} must be of type {wanted}, got {value!r}")


def _integer(key: str, value: Any) -> int:
    """A whole number, or a size such as "512MB" (powers of ten) or "2GiB" (powers of two)."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(str(value).strip())
    if match is None:
        raise ConfigError(f"{key} must be a whole number or a size like 512MB, got {value!r}")
    unit = (match[2] or "").capitalize()
    return int(float(match[1]) * _UNITS[unit]) if unit or "." in match[1] else int(match[1])


def _at_least(section: str, name: str, value: float, least: float) -> None:
    if not (math.isfinite(value) and value >= least):
        raise ConfigError(f"{section} {name} must be at least {least:g}, got {value}")


def _one_of(section: str, name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(f"{section} {name} must be one of {', '.join(known)}, got {value!r}")
