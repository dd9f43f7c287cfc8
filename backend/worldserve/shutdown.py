"""How a model instance learns that the server is about to stop.

Triton calls `finalize` only when no sequence is live; interactive sessions almost always are. So an
instance announces itself in the run directory, watches for the launcher's notice there, and the
launcher waits (a few seconds at most) until every instance has taken its announcement back.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from worldserve.processes import Process

__all__ = ["RUN_DIR_VARIABLE", "StopWatch", "clear_stop", "finished_by", "request_stop"]

RUN_DIR_VARIABLE = "CTRLCACHE_RUN_DIR"
_NOTICE = "stopping"
_INSTANCES = "instances"
_TELL_S = 1.0


class StopWatch:
    """Calls `on_stop` once, from its own thread, when the launcher is about to stop the server.

    Without a launcher (CTRLCACHE_RUN_DIR unset) it does nothing. `on_stop` has about four seconds.
    finished: how many requests the instance has answered so far; the launcher is told every second,
    so that it can tell one that hangs from one that is busy.
    """

    def __init__(
        self,
        on_stop: Callable[[], None],
        run_dir: Path | None = None,
        interval_s: float = 0.1,
        finished: Callable[[], int] | None = None,
    ) -> None:
        if run_dir is None and RUN_DIR_VARIABLE in os.environ:
            run_dir = Path(os.environ[RUN_DIR_VARIABLE])
        self._on_stop = on_stop
        self._finished = finished
        self._run_dir = run_dir
        self._interval_s = interval_s
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None
        if run_dir is None:
            return
        (run_dir / _INSTANCES).mkdir(exist_ok=True)
        self._announcement = run_dir / _INSTANCES / str(os.getpid())
        self._announcement.touch()
        self._thread = threading.Thread(target=self._watch, name="stop-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The instance is finalized in the ordinary way; `on_stop` will not be called any more."""
        self._closed.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
            self._announcement.unlink(missing_ok=True)

    def _watch(self) -> None:
        assert self._run_dir is not None
        told_s, told = 0.0, -1
        while not self._closed.wait(self._interval_s):
            if self._finished is not None and time.monotonic() - told_s >= _TELL_S:
                told_s, now = time.monotonic(), self._finished()
                if now != told:
                    told = now
                    # A full disk must not keep the instance from hearing that it is to stop.
                    with contextlib.suppress(OSError):
                        self._announcement.write_text(str(told))
            if (self._run_dir / _NOTICE).exists():
                try:
                    self._on_stop()
                finally:
                    self._announcement.unlink(missing_ok=True)
                return


def finished_by(run_dir: Path, pid: int) -> int | None:
    """Requests that an instance has answered, as it said last; None where it does not say."""
    try:
        return int((run_dir / _INSTANCES / str(pid)).read_text())
    except (OSError, ValueError):
        return None


def request_stop(run_dir: Path, wait_s: float) -> bool:
    """Ask every live instance to finish; whether all of them did so in time."""
    (run_dir / _NOTICE).touch()
    deadline = time.monotonic() + wait_s
    while True:
        pids = [int(path.name) for path in (run_dir / _INSTANCES).glob("[0-9]*")]
        states = [Process(pid).state for pid in pids]
        if all(state in "XZT" for state in states):
            return "T" not in states  # a stopped one has not finished, nor will it
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)


def clear_stop(run_dir: Path) -> None:
    """Before a start: no notice, and no announcement of instances that are gone."""
    (run_dir / _NOTICE).unlink(missing_ok=True)
    for path in (run_dir / _INSTANCES).glob("[0-9]*"):
        path.unlink(missing_ok=True)
