"""Find and end everything that one run started, however it died. Standard library only.

Every process of a run carries `CTRLCACHE_RUN_ID=<id>` in its environment, which its children
inherit: a stub whose server was killed, or one that is stopped, is still found. Every file of a run
in shared memory carries the id in its name.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path

__all__ = [
    "RUN_ID_VARIABLE",
    "Process",
    "end_processes",
    "hurry",
    "run_processes",
    "shm_entries",
    "sweep",
]

RUN_ID_VARIABLE = "CTRLCACHE_RUN_ID"
SHM = Path("/dev/shm")


class Process:
    """One live process as /proc shows it. `state` is its letter: R, S, D, T (stopped), Z (dead)."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    @property
    def command(self) -> list[str]:
        return [os.fsdecode(part) for part in _read(self.pid, "cmdline").split(b"\0") if part]

    @property
    def state(self) -> str:
        # The name in parentheses may itself hold spaces and parentheses.
        fields = _read(self.pid, "stat").rpartition(b")")[2].split()
        return fields[0].decode() if fields else "X"

    @property
    def alive(self) -> bool:
        return self.state not in "XZ"

    def __repr__(self) -> str:
        return f"Process({self.pid}, {self.state}, {' '.join(self.command)[:80]!r})"


def run_processes(run_id: str) -> list[Process]:
    """The live processes of a run, this one excepted."""
    marker = f"{RUN_ID_VARIABLE}={run_id}".encode()
    found = []
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        pid = int(entry.name)
        if marker in _read(pid, "environ").split(b"\0"):
            found.append(Process(pid))
    return [process for process in found if process.alive]


def end_processes(find: Callable[[], Iterable[Process]], wait_s: float = 3.0) -> list[Process]:
    """Kill (SIGKILL reaches stopped ones too) until none is found; returns what would not go."""
    deadline = time.monotonic() + wait_s
    while remaining := list(find()):
        for process in remaining:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)
        time.sleep(0.02)
        for process in remaining:
            # Orphans may have become children of ours (as process 1 of a container).
            with contextlib.suppress(ChildProcessError):
                os.waitpid(process.pid, os.WNOHANG)
        if time.monotonic() > deadline:
            return [process for process in find() if process.alive]
    return []


def hurry(pid: int) -> None:
    """Let a killed process die at once, as far as we may: some threads of tritonserver run at so
    low a priority that on a crowded machine they take half a minute to notice."""
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, int(thread), -20)


def shm_entries(run_id: str, shm: Path = SHM) -> list[Path]:
    """What a run has in shared memory: its own directory and Triton's regions."""
    return sorted(shm.glob(f"ctrlcache-{run_id}*"))


def sweep(run_id: str, shm: Path = SHM) -> list[Process]:
    """End every process of the run and remove its files in shared memory."""
    left = end_processes(lambda: run_processes(run_id))
    for path in shm_entries(run_id, shm):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)
    return left


def _read(pid: int, name: str) -> bytes:
    try:
        with open(f"/proc/{pid}/{name}", "rb") as file:
            return file.read()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""
