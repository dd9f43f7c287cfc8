"""Idle instances of one server think for busy ones.

A user's session is answered by one instance, and its thinking time ends with each request of his.
The other instances may have nothing to do meanwhile. So each tells the others whether it is idle
(one byte in shared memory), and probes around a couplet are handed to an idle one: where the
session is and which couplet it is about, not data, since all instances read the same hot tier. What
comes of it goes there, too. Work that is handed over is optional: nothing is lost where it is lost.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ctrlcache.errors import CorruptRecord
from worldserve.background import Background, Urgency
from worldserve.models.protocol import Checkpoint, Rendering, WorldModel
from worldserve.scoring import Place
from worldserve.session import decode_session, encode_session

__all__ = ["Errand", "Siblings"]

_log = logging.getLogger(__name__)
_HEAD = struct.Struct("<cQI")  # what it is, its number, length of the text
_JOB, _TAKEN, _DONE = b"J", b"T", b"D"
_MOST_BYTES = 1 << 18
_PATIENCE_S = 3.0  # then an errand that nobody has taken counts as lost
_MOST_S = 60.0  # and then one that was taken
_POLL_S = 0.25
_IDLE, _BUSY = b"\x01", b"\x00"
_here = itertools.count()


class Errand:
    """A piece of work that a sibling was asked to do; a handle for `Agenda`."""

    def __init__(self) -> None:
        self._until_s = time.monotonic() + _PATIENCE_S
        self.done = False

    @property
    def alive(self) -> bool:
        return not self.done and time.monotonic() < self._until_s

    def postpone(self) -> None:
        """It is on its way: nothing to be done."""

    def taken(self) -> None:
        """A sibling has it now."""
        self._until_s = time.monotonic() + _MOST_S


@dataclass(eq=False)
class _Sibling:
    path: str
    state: mmap.mmap


#: Probes around a couplet (its id) at a place; the text is the couplet's lineage.
Probe = Callable[[Place, bytes, str, Checkpoint], None]


class Siblings:
    """The instances that share `directory`, each with a socket and a byte of its own there.

    probe: does what a sibling asks for. OSError where the directory cannot be used.
    """

    def __init__(
        self,
        directory: Path,
        provenance: bytes,
        model: WorldModel,
        background: Background,
        probe: Probe,
    ) -> None:
        self._directory = directory
        self._provenance = provenance
        self._model = model
        self._background = background
        self._probe = probe
        self._numbers = itertools.count(1)
        self._errands: dict[int, Errand] = {}
        self._waiting: list[Callable[[], None]] = []
        self._others: dict[str, _Sibling] = {}
        self._lock = threading.Lock()
        self._closed = False
        directory.mkdir(mode=0o700, exist_ok=True)
        name = f"{os.getpid()}-{next(_here)}"
        self._path = str(directory / f"{name}.sock")
        self._flag = directory / f"{name}.idle"
        self._flag.write_bytes(_BUSY)
        with open(self._flag, "r+b") as file:
            self._state = mmap.mmap(file.fileno(), 1)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(self._path)
        self._socket.settimeout(_POLL_S)
        self._thread = threading.Thread(target=self._listen, name="siblings", daemon=True)
        self._thread.start()
        background.on_idle = self._tell
        background.when_idle(_nothing)  # after which it tells for the first time

    # -- asking ----------------------------------------------------------------------------------

    def idle(self) -> bool:
        """Whether some sibling has nothing to do."""
        return any(other.state[:1] == _IDLE for other in self._known())

    def ask(self, place: Place, couplet: bytes, lineage: str) -> Errand:
        """Have a couplet that is in the hot tier, or will be when all that is to be kept has been,
        probed by an idle sibling; if none is left by then, the errand is lost."""
        errand, number = Errand(), next(self._numbers)
        with self._lock:
            self._errands[number] = errand
        # Behind the slices that this very request has computed: a sibling reads them.
        self._background.submit(
            Urgency.KEEP, lambda _: self._send(number, self._job(number, place, couplet, lineage))
        )
        return errand

    def when_done(self, call: Callable[[], None]) -> None:
        """Call `call` (quick) when no errand is under way, from any thread."""
        with self._lock:
            under_way = any(errand.alive for errand in self._errands.values())
            if under_way:
                self._waiting.append(call)
        if not under_way:
            call()

    def close(self) -> None:
        self._closed = True
        self._background.on_idle = None
        self._thread.join()
        self._socket.close()
        for path in (self._path, self._flag):
            with contextlib.suppress(OSError):
                os.unlink(path)
        self._done(*self._errands)

    def _job(self, number: int, place: Place, couplet: bytes, lineage: str) -> bytes:
        text = json.dumps(
            {
                "horizon": place.horizon,
                "seed": place.seed,
                "with_frames": place.with_frames,
                "rendering": asdict(place.rendering),
                "couplet": couplet.hex(),
                "lineage": lineage,
            }
        ).encode()
        session = encode_session(place.session, self._provenance)
        return _HEAD.pack(_JOB, number, len(text)) + text + session

    def _send(self, number: int, job: bytes) -> None:
        for other in self._known():
            if other.state[:1] != _IDLE or len(job) > _MOST_BYTES:
                continue
            other.state[:1] = _BUSY  # it says itself when it is idle again
            try:
                self._socket.sendto(job, socket.MSG_DONTWAIT, other.path)
                return
            except (ConnectionRefusedError, FileNotFoundError):
                self._forget(other)  # it was killed
            except OSError as error:
                _log.debug("a sibling cannot be asked: %s", error)
        self._done(number)

    def _known(self) -> list[_Sibling]:
        """All siblings that are there now."""
        try:
            paths = {str(path) for path in self._directory.glob("*.sock")} - {self._path}
        except OSError:
            return []
        for gone in self._others.keys() - paths:
            del self._others[gone]
        for path in paths - self._others.keys():
            with (
                contextlib.suppress(OSError, ValueError),
                open(Path(path).with_suffix(".idle"), "r+b") as file,
            ):
                self._others[path] = _Sibling(path, mmap.mmap(file.fileno(), 1))
        return list(self._others.values())

    def _forget(self, other: _Sibling) -> None:
        self._others.pop(other.path, None)
        for path in (Path(other.path), Path(other.path).with_suffix(".idle")):
            path.unlink(missing_ok=True)

    # -- being asked -----------------------------------------------------------------------------

    def _tell(self, idle: bool) -> None:
        self._state[:1] = _IDLE if idle else _BUSY

    def _listen(self) -> None:
        while not self._closed:
            try:
                data, sender = self._socket.recvfrom(_MOST_BYTES)
            except TimeoutError:
                self._done()
                continue
            except OSError:
                return
            try:
                what, number, length = _HEAD.unpack_from(data)
                if what == _DONE:
                    self._done(number)
                elif what == _TAKEN:
                    self._taken(number)
                else:
                    self._take(number, data[_HEAD.size :], length, sender)
            except (CorruptRecord, KeyError, TypeError, ValueError, struct.error) as error:
                _log.warning("what a sibling asks for cannot be read: %s", error)

    def _take(self, number: int, data: bytes, length: int, sender: str) -> None:
        said: dict[str, Any] = json.loads(data[:length])
        session = decode_session(data[length:], self._provenance)
        conditioning, _ = self._model.condition(session.prompt, session.view)
        place = Place(
            session=session,
            conditioning=conditioning,
            horizon=int(said["horizon"]),
            seed=int(said["seed"]),
            with_frames=bool(said["with_frames"]),
            rendering=Rendering(**said["rendering"]),
        )
        couplet, lineage = bytes.fromhex(said["couplet"]), str(said["lineage"])

        def tell(what: bytes) -> None:
            with contextlib.suppress(OSError):
                self._socket.sendto(_HEAD.pack(what, number, 0), socket.MSG_DONTWAIT, sender)

        def work(checkpoint: Checkpoint) -> None:
            try:
                self._probe(place, couplet, lineage, checkpoint)
            finally:
                tell(_DONE)

        tell(_TAKEN)
        self._background.submit(Urgency.SCORE, work)

    def _taken(self, number: int) -> None:
        with self._lock:
            if number in self._errands:
                self._errands[number].taken()

    def _done(self, *numbers: int) -> None:
        """These errands are over, and those that were lost; whoever waits for that is told."""
        with self._lock:
            for number in numbers:
                if number in self._errands:
                    self._errands.pop(number).done = True
            self._errands = {n: errand for n, errand in self._errands.items() if errand.alive}
            ready = [] if self._errands else self._waiting
            if ready:
                self._waiting = []
        for call in ready:
            call()


def _nothing() -> None:
    return None
