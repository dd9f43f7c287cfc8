"""Backups of a warm directory while it is written, and the way back to one in seconds.

Sealed segments never change, so a backup shares them by hard link and costs neither time nor disk;
only the tail and the small files are copied. The index needs no backup: it follows from the
segments. A backup is a warm directory like any other, and appears under its name when complete.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from ctrlcache.errors import InvalidInput, TierUnavailable
from ctrlcache.tiers import segments
from ctrlcache.tiers.warm_files import QUARANTINE_NAME, STORE_NAME, USES_NAME, store_id

__all__ = ["Backup", "backup", "read_manifest", "restore"]

MANIFEST_NAME = "backup.json"
_FORMAT = 1
_ATTEMPTS = 20
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Backup:
    """What a backup holds: `linked` segments shared with the source, `copied` ones of its own."""

    created_s: float
    linked: int
    copied: int
    size_bytes: int


def backup(directory: str | Path, target: str | Path) -> Backup:
    """Back up the warm `directory` as `target`, which must not exist; its parent must.

    Whoever writes meanwhile is neither stopped nor slowed down; the backup holds all records that
    were reported stored before the call. Hard links need `target` on the same file system, on
    another one segments are copied. InvalidInput, TierUnavailable or OSError leave nothing behind.
    """
    source, target = Path(directory), Path(target)
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise InvalidInput(f"{target} exists: name a directory that does not")
    if not target.parent.is_dir():
        raise InvalidInput(f"{target.parent} is no directory: make it first")
    staging = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        for _ in range(_ATTEMPTS):
            with contextlib.suppress(FileNotFoundError):
                return _take(source, target, staging)
            # Compacted away under our hands: what was in it lies in newer segments now.
            shutil.rmtree(staging, ignore_errors=True)
            if not source.is_dir():
                raise InvalidInput(f"{source} is no directory")
        raise TierUnavailable(f"{source} changes too fast to be backed up, try again")
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def restore(source: str | Path, directory: str | Path) -> Backup:
    """Put a backup in the place of the warm `directory`, which may be in use.

    What was there is kept beside it as `<directory>.before-<time>`. Servers notice within moments
    and make their index anew; until then they find records of the backup or none. The backup itself
    stays as it is and can be restored again.
    """
    source, directory = Path(source), Path(directory)
    manifest = read_manifest(source)
    if directory.resolve() == source.resolve():
        raise InvalidInput(f"{source} cannot be restored to itself")
    if directory.exists() and os.path.ismount(directory):
        raise InvalidInput(
            f"{directory} is a mount point and cannot be replaced: use a directory below it"
        )
    if not directory.parent.is_dir():
        raise InvalidInput(f"{directory.parent} is no directory: make it first")
    staging = directory.with_name(f".{directory.name}.{secrets.token_hex(4)}")
    try:
        staging.mkdir()
        _gather(source, staging)
        (staging / STORE_NAME).unlink(missing_ok=True)
        store_id(staging, create=True)  # tells every index that this is another store
        segments.fsync_directory(staging)
        if directory.exists():
            os.rename(directory, _free_name(directory))
        os.rename(staging, directory)
        segments.fsync_directory(directory.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return manifest


def read_manifest(source: str | Path) -> Backup:
    """What a backup says of itself; InvalidInput where `source` is none."""
    path = Path(source) / MANIFEST_NAME
    try:
        found = json.loads(path.read_bytes()[:10_000])
        if found["format"] != _FORMAT:
            raise InvalidInput(f"{source} has backup format {found['format']}, expected {_FORMAT}")
        return Backup(
            float(found["created_s"]),
            int(found["linked"]),
            int(found["copied"]),
            int(found["size_bytes"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidInput(f"{source} is no backup ({path.name}: {error})") from error


def _take(source: Path, target: Path, staging: Path) -> Backup:
    created_s = time.time()
    staging.mkdir()
    linked, copied, size = _gather(source, staging)
    made = Backup(created_s, linked, copied, size)
    manifest = json.dumps({"format": _FORMAT, **asdict(made)}, indent=1).encode()
    _write(staging / MANIFEST_NAME, manifest)
    segments.fsync_directory(staging)
    if target.exists():
        target.rmdir()
    os.rename(staging, target)
    segments.fsync_directory(target.parent)
    return made


def _gather(source: Path, staging: Path) -> tuple[int, int, int]:
    """(segments linked, copied, bytes) into `staging`; the newest segment last, so that whatever
    left a segment by compaction meanwhile is in it."""
    linked = copied = total = 0
    for number in segments.list_segments(source):
        path = segments.segment_path(source, number)
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            sealed = segments.read_footer(file.fileno(), number, size) is not None
        if sealed and _link(path, staging / path.name):
            linked += 1
        else:
            _copy(path, staging / path.name)
            copied += 1
        total += size
    for name in (QUARANTINE_NAME, USES_NAME, STORE_NAME):
        with contextlib.suppress(FileNotFoundError):
            _copy(source / name, staging / name)
    return linked, copied, total


def _link(path: Path, target: Path) -> bool:
    try:
        os.link(path, target)
    except OSError as error:
        if error.errno in (errno.EXDEV, errno.EPERM, errno.EMLINK, errno.EOPNOTSUPP):
            return False
        raise
    return True


def _copy(path: Path, target: Path) -> None:
    with path.open("rb") as source, target.open("xb") as copy:
        while data := source.read(_CHUNK_BYTES):
            copy.write(data)
        copy.flush()
        os.fsync(copy.fileno())


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _free_name(directory: Path) -> Path:
    stamp = time.strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{n}" for n in range(1, 1000))):
        path = directory.with_name(f"{directory.name}.before-{stamp}{suffix}")
        if not path.exists():
            return path
    raise InvalidInput(f"too many former versions beside {directory}: remove some")
