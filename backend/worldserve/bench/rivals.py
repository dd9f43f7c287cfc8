"""The rivals: what answers a user's question, on the same server, the same clips, the same trace.

A rival is a way to play (how questions become requests, with which cache in front) and the
parameters of the server behind it. `docs/benchmarks.md` describes each; a test for each shows it
hitting where it should and missing where it should.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from worldserve.bench.stores import Store
from worldserve.bench.timeline import Timeline
from worldserve.bench.workload import HORIZON, Action, Clip, Controls, Pixels
from worldserve.sequence_client import Reply, SequenceClient

__all__ = ["RIVALS", "Play", "Recomputed", "Remembered", "Rival", "Stateful"]

#: Frames that a full recomputation encodes: what the reference model's attention spans.
_CONTEXT = 32


class Play(Protocol):
    """One user's session, as a rival answers it."""

    def ask(self, action: Action) -> Reply:
        """The answer; `watched` frames of the action are shown first."""
        ...

    def watch(self, action: Action) -> float:
        """Frames are shown, nothing is asked; ms until they were taken."""
        ...

    def settle(self) -> None:
        """Wait for whatever the server does after its replies."""
        ...

    def close(self, drain: bool = False) -> None:
        """The session ends; drain: with nothing left to be done of it."""
        ...


class Stateful:
    """A session whose server remembers it: each request sends only what is new."""

    def __init__(self, client: Any, clip: Clip, **parameters: Any) -> None:
        self._clip = clip
        self._wire = SequenceClient(client, HORIZON, **parameters)
        self._timeline = Timeline()
        self._pending: int | None = None

    def ask(self, action: Action) -> Reply:
        frames, samples = _observed(self._clip, action)
        where = self._where(action)
        self._timeline.follow(self._clip, action)
        if _looks_elsewhere(self._clip, action):
            frames = _other(self._clip)[[self._timeline.base]]
        return self._wire.ask(samples, frames, **where)

    def watch(self, action: Action) -> float:
        frames, samples = _observed(self._clip, action)
        where = self._where(replace(action, mode="probe"))
        self._timeline.follow(self._clip, action)
        return self._wire.tell(samples, frames, **where)

    def settle(self) -> None:
        self._wire.tell(self._nothing(), drain="true", **self._where(None))

    def close(self, drain: bool = False) -> None:
        if self._wire.started:
            self._wire.tell(self._nothing(), end=True, drain="true" if drain else "false")

    def moved(self, action: Action) -> None:
        """The question was answered elsewhere; the session still has to go where it went."""
        self._timeline.follow(self._clip, action)
        if action.mode == "seek":
            self._pending = action.seek
        if action.mode == "advance":
            held = np.array(action.control, np.float32)
            self._wire.tell(np.repeat(held[None], action.steps, 0), **self._where(action))

    def _nothing(self) -> Controls:
        return np.zeros(self._clip.controls.shape[1], np.float32)

    def _where(self, action: Action | None) -> dict[str, Any]:
        """Request parameters: where the session is, and how it moves."""
        given: dict[str, Any] = {}
        if not self._wire.started:
            given["prompt"] = self._clip.prompt
        if self._pending is not None:
            given |= {"mode": "seek", "frame": self._pending}
            self._pending = None
        if action is not None and action.mode == "seek":
            given |= {"mode": "seek", "frame": action.seek}
        if action is None:
            return given
        elsewhere = _looks_elsewhere(self._clip, action)
        if "frame" in given and (elsewhere or action.mode == "advance"):
            # One request either goes back, or moves on, or looks from elsewhere.
            self._wire.tell(np.array(action.control, np.float32), **given)
            given = {}
        if action.mode == "advance":
            given["mode"] = "advance"
        if elsewhere:
            given["view"] = self._clip.other_view
        return given


class Recomputed:
    """No memory at all: every question sends the whole context and computes everything."""

    def __init__(self, client: Any, clip: Clip, **parameters: Any) -> None:
        self._client, self._clip, self._parameters = client, clip, parameters
        self._timeline = Timeline()

    def ask(self, action: Action) -> Reply:
        after = action.mode == "advance"
        if not after:
            self._timeline.follow(self._clip, action)
        began = time.perf_counter()
        wire = SequenceClient(self._client, HORIZON, cache="off", **self._parameters)
        held = np.array(action.control, np.float32)[None]
        begins: dict[str, Any] = {"prompt": self._clip.prompt}
        seen = self._clip.frames
        if _looks_elsewhere(self._clip, action):
            # The other camera's own frames, all of them, as if it had been on all the time.
            seen, begins["view"] = _other(self._clip), self._clip.other_view
        stretches = self._timeline.stretches(_CONTEXT)
        for number, stretch in enumerate(stretches):
            given = {} if wire.started else begins
            last = number + 1 == len(stretches)
            if not stretch.observed:
                wire.tell(stretch.controls, mode="advance", **given)
                if last:
                    reply = wire.ask(held, end=True)
                continue
            frames = seen[list(stretch.clip_frames)]
            # The first frame of all was reached under no control that matters.
            reached = stretch.controls[1:] if number == 0 else stretch.controls
            if last:
                reply = wire.ask(np.vstack([reached, held]), frames, end=True, **given)
            else:
                wire.tell(np.vstack([reached, held]), frames, **given)
        if after:
            self._timeline.follow(self._clip, action)
        return replace(reply, latency_ms=(time.perf_counter() - began) * 1e3)

    def watch(self, action: Action) -> float:
        self._timeline.follow(self._clip, action)
        return 0.0

    def settle(self) -> None:
        return None

    def close(self, drain: bool = False) -> None:
        return None


class Remembered:
    """A cache of whole answers in front of a stateful server, keyed on the whole question."""

    def __init__(self, behind: Stateful, clip: Clip, store: Store) -> None:
        self._behind, self._clip, self._store = behind, clip, store
        self._timeline = Timeline()

    def ask(self, action: Action) -> Reply:
        began = time.perf_counter()
        after = action.mode == "advance"
        if not after:
            self._timeline.follow(self._clip, action)
        key = self._key(action)
        # What opens a session, or shows frames with the question, must reach the server anyway.
        forwarded = action.watched[0] < action.watched[1]
        found = None if forwarded else self._store.get(key)
        if found is None:
            reply = self._behind.ask(action)
            self._store.put(key, reply)
        else:
            reply = replace(found, tier=self._store.name, exact=True)
        latency_ms = (time.perf_counter() - began) * 1e3
        if found is not None:
            self._behind.moved(action)  # nobody waits for this
        if after:
            self._timeline.follow(self._clip, action)
        return replace(reply, latency_ms=latency_ms)

    def _key(self, action: Action) -> bytes:
        control = np.array(action.control, np.float32)
        scene = f"{self._clip.suite}/{self._clip.name}/{self._clip.prompt}".encode()
        view = self._clip.other_view.encode() if _looks_elsewhere(self._clip, action) else b""
        return scene + self._timeline.digest() + control.tobytes() + view

    def watch(self, action: Action) -> float:
        self._timeline.follow(self._clip, action)
        return self._behind.watch(action)

    def settle(self) -> None:
        self._behind.settle()

    def close(self, drain: bool = False) -> None:
        self._behind.close(drain)


def _looks_elsewhere(clip: Clip, action: Action) -> bool:
    """Whether the question is about the other camera, and there is one."""
    return action.view and clip.other is not None


def _other(clip: Clip) -> Pixels:
    assert clip.other is not None
    return clip.other


def _observed(clip: Clip, action: Action) -> tuple[Pixels | None, Controls]:
    """Frames to show with an action, and its control samples: the frames' own transitions, then the
    plan."""
    first, last = action.watched
    held = np.array(action.control, np.float32)[None]
    if action.mode == "advance":
        held = np.repeat(held, action.steps, 0)
    if first >= last:
        return None, held
    reached = clip.controls[max(first - 1, 0) : last - 1]
    return clip.frames[first:last], np.vstack([reached, held])


@dataclass(frozen=True)
class Rival:
    """settings: of the server's model. store: what stands in front, by name. begin: a session.

    cached: whether the server's cache is in use. carries: whether other cameras see the session's
    own prediction, carried over, as the reference's do; else a prediction of their own.
    """

    name: str
    label: str
    settings: Mapping[str, str] = field(default_factory=dict)
    store: str = ""
    cached: bool = True
    carries: bool = True
    begin: Callable[[Any, Clip, Store | None, float], Play] = field(
        default=lambda client, clip, store, max_error: Stateful(
            client, clip, max_error=str(max_error)
        )
    )


def _off(client: Any, clip: Clip, store: Store | None, max_error: float) -> Play:
    return Stateful(client, clip, cache="off")


def _recomputed(client: Any, clip: Clip, store: Store | None, max_error: float) -> Play:
    return Recomputed(client, clip)


def _remembered(client: Any, clip: Clip, store: Store | None, max_error: float) -> Play:
    if store is None:
        raise ValueError("this rival needs a store")
    return Remembered(Stateful(client, clip, cache="off"), clip, store)


#: WorldCache off: no feature is kept, and every step of the generator computed.
_PLAIN = {
    "features_l1_mib": "0",
    "features_l2_mib": "0",
    "features_disk_mib": "0",
    "reuse": "none",
}
_IDLE = {**_PLAIN, "background": "false"}
RIVALS: dict[str, Rival] = {
    rival.name: rival
    for rival in (
        Rival("stateful", "stateful server, KV kept", _IDLE, cached=False, begin=_off),
        Rival(
            "recompute",
            "no cache, everything again",
            _IDLE,
            cached=False,
            carries=False,
            begin=_recomputed,
        ),
        Rival("response", "response cache", _IDLE, "dict", cached=False, begin=_remembered),
        Rival("redis", "LRU cache in Redis", _IDLE, "redis", cached=False, begin=_remembered),
        Rival("fixed", "CtrlCache, fixed rules", {**_PLAIN, "trust_policy": "fixed"}),
        Rival("trust", "CtrlCache, trust", _PLAIN),
        Rival("worldcache", "trust and WorldCache"),
        Rival("no-migration", "trust, no migration", {**_PLAIN, "trust_migration": "reuse"}),
        Rival("no-resume", "trust, no stored slices", {**_PLAIN, "resume": "false"}),
        Rival("no-thinking", "trust, no thinking time", _IDLE),
    )
}
