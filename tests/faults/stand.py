"""A server as it is really run, `ctrlcache up` in a process of its own, to do harm to."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tiny_world import TINY

from worldserve import processes

__all__ = ["PROJECT", "Endpoints", "Stand", "can_mount", "stopped"]

PROJECT = Path(__file__).resolve().parents[2]
_READY_S = 120.0


@dataclass(frozen=True)
class Endpoints:
    """Each as host:port."""

    grpc: str
    http: str
    metrics: str


def private_mounts(sizes: Mapping[Path, int]) -> list[str]:
    """A prefix to a command: it sees a small file system of its own at each path (bytes)."""
    mounts = [
        f"mount -t tmpfs -o size={size},mode=1777 tmpfs {path}" for path, size in sizes.items()
    ]
    namespace = ["unshare", "--mount", "--propagation=private"]
    if os.geteuid() != 0:
        namespace += ["--user", "--map-root-user"]
    return [*namespace, "sh", "-c", " && ".join([*mounts, 'exec "$@"']), "sh"]


def can_mount() -> bool:
    """Whether this user and this machine allow that."""
    with contextlib.suppress(FileNotFoundError):
        trial = [*private_mounts({Path("/dev/shm"): 1 << 20}), "true"]
        return subprocess.run(trial, capture_output=True, check=False).returncode == 0
    return False


class Stand:
    """`ctrlcache up` with the tiny model; `private`: file systems of its own, by size.

    `said` tells what it printed; `close` stops it, and fails where anything is left behind.
    """

    def __init__(
        self,
        directory: Path,
        *options: str,
        settings: Mapping[str, str] | None = None,
        private: Mapping[Path, int] | None = None,
        environment: Mapping[str, str] | None = None,
        warm: Path | None = None,
        tiny: bool = True,
    ) -> None:
        self.directory = directory
        self.run_dir = directory / "run"
        self.warm_dir = warm or directory / "warm"
        shutil.rmtree(self.run_dir, ignore_errors=True)
        self.warm_dir.mkdir(parents=True, exist_ok=True)
        parameters = {"flush_interval_s": "0.5", "flush_couplets": "64", **(settings or {})}
        if tiny:
            parameters |= {"world_model_class": TINY, "history_frames": "64"}
        command = [
            *(private_mounts(private) if private else []),
            *(sys.executable, "-m", "ctrlcache.cli", "up", "--no-check"),
            *("--http-port", "0", "--grpc-port", "0", "--metrics-port", "0", "--health-port", "0"),
            *("--run-dir", str(self.run_dir), "--warm-dir", str(self.warm_dir)),
            *(part for key, value in parameters.items() for part in ("--set", f"{key}={value}")),
            *options,
        ]
        if "--instances" not in options:
            command += ["--instances", "1"]
        if "--hot-bytes" not in options:
            command += ["--hot-bytes", "256MiB"]
        if not {"--cold-endpoint", "--objects-dir"} & set(options):
            command += ["--no-cold"]
        self._output = directory / "up.log"
        with open(self._output, "wb") as output:
            self.process = subprocess.Popen(
                command,
                cwd=PROJECT,
                env={**os.environ, "COLUMNS": "200", **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        try:
            self._wait()
        except BaseException:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(30)
            raise

    # -- where it is -----------------------------------------------------------------------------

    @property
    def run(self) -> dict[str, object]:
        """run.json, as of its last start."""
        description: dict[str, object] = json.loads((self.run_dir / "run.json").read_text())
        return description

    @property
    def run_id(self) -> str:
        return str(self.run["run_id"])

    @property
    def endpoints(self) -> Endpoints:
        run = self.run
        return Endpoints(str(run["grpc"]), str(run["http"]), str(run["metrics"]))

    @property
    def server_pid(self) -> int:
        return int(str(self.run["server_pid"]))

    def seen(self, path: Path | str) -> Path:
        """A path as the server's own processes see it."""
        return Path(f"/proc/{self.process.pid}/root{path}")

    @property
    def shm_dir(self) -> Path:
        return self.seen(str(self.run["shm_dir"]))

    def stubs(self, model: str = "world_model") -> list[int]:
        path = f"{self.run_dir / 'repository' / model}{os.sep}"
        return sorted(
            process.pid
            for process in processes.run_processes(self.run_id)
            if any(argument.startswith(path) for argument in process.command[1:2])
        )

    def writer(self) -> int:
        """The process that writes the warm tier."""
        return int(json.loads((self.seen(self.warm_dir) / "writer.lock").read_text())["pid"])

    def said(self) -> str:
        return self._output.read_text(errors="replace")

    def mended(self) -> bool:
        """Whether the supervisor has brought back all that it found lost."""
        return len(re.findall(r" lost: ", self.said())) == len(re.findall(" is back ", self.said()))

    def events(self) -> str:
        """What the supervisor did, shortly: "world_model reload 2.4 s"."""
        back = re.findall(r"(\w+) is back after ([\d.]+ s) by (\w+)", self.said())
        gave_up = re.findall(r"(\w+) does not come back", self.said())
        return ", ".join(
            [f"{model} {how} {took}" for model, took, how in back]
            + [f"{model} given up" for model in gave_up]
        )

    # -- its end -----------------------------------------------------------------------------------

    def close(self) -> None:
        """SIGTERM; no process and no file in shared memory is left."""
        if self.process.poll() is None:
            run_id = self.run_id
            for pid in self.stubs():  # a stopped one would be continued by nobody
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(60)
            left = processes.run_processes(run_id)
            shm = processes.shm_entries(run_id)
            assert not left, left
            assert not shm, shm

    def _wait(self) -> None:
        deadline = time.monotonic() + _READY_S
        while "Ctrl-C stops everything" not in self.said():
            if self.process.poll() is not None:
                raise AssertionError(f"not started:\n{self.said()}")
            assert time.monotonic() < deadline, self.said()
            time.sleep(0.05)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """SIGSTOP; continued in the end, if it is still there."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
