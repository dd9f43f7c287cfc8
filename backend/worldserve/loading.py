"""Notice a stub that dies while its model is being loaded.

Triton 2.51 does not always: where the process ends before its instance has begun to initialise, the
load waits for it until somebody's patience ends. What the log says of the reason is told as well.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from worldserve.processes import Process

__all__ = ["Loading", "ServerLog", "during", "refused"]

#: Between the end of the first process of a model and the start of those that serve; on a crowded
#: machine that takes a moment.
PATIENCE_S = 8.0

_NEWLINE = r"\n"
#: The last line of a traceback, and what Triton and the loader of libraries say.
_REASONS = re.compile(
    r"^(?:[\w.]*(?:Error|Exception|Interrupt)\b.*"
    r"|.*failed to load '\w+' version \d+: (?!.*is not healthy)(.*?)\"?"
    r"|.*error while loading shared libraries: .*"
    r"|terminate called .*|\s*what\(\): .*)$"
)


class Loading:
    """Looked at again and again while a model is loaded: `check` says what is wrong, or None.

    Triton starts one process, which tells it the model's configuration and ends; then those of all
    `instances` at once. stubs: the live ones.
    """

    def __init__(
        self,
        stubs: Callable[[], Sequence[Process]],
        instances: int,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stubs = stubs
        self._instances = instances
        self._now = monotonic
        self._seen: set[int] = set()
        #: Whether the load has certainly begun: then its first process is expected, too.
        self.asked = False
        self._missing_since_s: float | None = None

    def check(self) -> str | None:
        """What is wrong: a process has ended (perhaps before anybody saw it), and those that should
        be there now are not."""
        live = {stub.pid for stub in self._stubs()}
        self._seen |= live
        missing = self._instances - len(live)
        if missing <= 0 or (self._seen == live and (live or not self.asked)):
            self._missing_since_s = None
            return None
        now = self._now()
        if self._missing_since_s is None:
            self._missing_since_s = now
        if now - self._missing_since_s < PATIENCE_S:
            return None
        return f"{missing} of {self._instances} stub processes ended while loading"

    def during(self, work: Callable[[], None]) -> str | None:
        """Do `work`, which asks for the load, as `during` does: should a process die meanwhile,
        what is wrong."""
        self.asked = True
        return during(work, self.check)


def during(
    work: Callable[[], None], check: Callable[[], str | None], every_s: float = 0.2
) -> str | None:
    """Do `work`: None when it is done, or it raises what that raises. As soon as `check` says that
    something is wrong, what that is; the work is then left to end by itself."""
    raised: list[BaseException] = []
    done = threading.Event()

    def do() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)
        finally:
            done.set()

    threading.Thread(target=do, name="loading", daemon=True).start()
    while not done.wait(every_s):
        if (wrong := check()) is not None:
            return wrong
    if raised:
        raise raised[0]
    return None


def refused(hosts: Sequence[str], ports: Sequence[int]) -> list[int]:
    """Those of the ports, each of its host, that nobody listens on."""
    found = []
    for host, port in zip(hosts, ports, strict=True):
        try:
            socket.create_connection((host, port), timeout=1.0).close()
        except ConnectionRefusedError:
            found.append(port)
        except OSError:
            pass  # too slow to say is not refused
    return found


class ServerLog:
    """The file that tritonserver and its stubs write to, over all starts of a run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._from = 0

    def mark(self) -> None:
        """A start begins here."""
        self._from = self.path.stat().st_size if self.path.exists() else 0

    def names_load_of(self, model: str) -> bool:
        """Whether Triton has begun to load a model since the mark."""
        return f'"loading: {model}:' in self._read(self._from)

    def tail(self, lines: int) -> str:
        # Triton's option tables hide what matters.
        text = [line for line in self._read(0).splitlines() if not re.match(r"^[+|]", line)]
        return "\n".join(text[-lines:])

    def with_reason(self, what: str) -> str:
        """`what`, and after it the last line since the mark that names a reason, if any does."""
        for line in reversed(self._read(self._from).splitlines()):
            if match := _REASONS.match(line):
                # Triton writes a traceback as one line, its ends of lines as two characters.
                return f"{what}: {(match[1] or line).partition(_NEWLINE)[0].strip()}"
        return what

    def _read(self, offset: int) -> str:
        try:
            with open(self.path, "rb") as log:
                log.seek(offset)
                return log.read().decode(errors="replace")
        except FileNotFoundError:
            return ""
