"""Play sessions against rivals, and keep what each answer was: one file per session, resumable.

For each rival a server of its own is started, with an empty cache; sessions follow each other as
users would. The first rival, `stateful`, gives the uncached answer to every question; all others
are judged against it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from worldserve.bench.judge import contradiction, from_truth, judge
from worldserve.bench.rivals import Play, Rival
from worldserve.bench.servers import Servers, bytes_stored, counted, cpu_s, open_store
from worldserve.bench.timeline import Timeline
from worldserve.bench.truth import Truths
from worldserve.bench.workload import Action, Clip, Controls
from worldserve.sequence_client import Reply

__all__ = ["REFERENCE", "Plan", "Session", "play_rival", "to_play"]

#: The rival whose answers are the uncached ones.
REFERENCE = "stateful"
_CELL = 0.05


@dataclass(frozen=True, eq=False)
class Session:
    """One user on one clip. source: `model` for modelled users, else `hands`. whole: the actions of
    the default user, where these are the beginning of them."""

    clip: Clip
    user: int
    source: str
    actions: Sequence[Action] = field(repr=False)
    whole: Sequence[Action] = field(default=(), repr=False)

    @property
    def name(self) -> str:
        return f"{self.clip.suite}.{self.clip.name}.{self.source}.{self.user}"

    @property
    def questions(self) -> int:
        return sum(action.asks for action in self.actions)


@dataclass(frozen=True)
class Plan:
    """What is played, and how. drain: background work is done before each next question, and nobody
    pauses; else at the users' own pace. scale (S,): of states. operations: their names, in the
    order of the states' logits, which begin at `logits`.
    """

    repository: Path
    work: Path
    scale: Controls = field(repr=False)
    operations: tuple[str, ...] = ()
    logits: int = 9
    max_error: float = 0.02
    drain: bool = False
    truths: Truths | None = None
    settings: dict[str, str] = field(default_factory=dict)


def to_play(rival: Rival, sessions: Sequence[Session], plan: Plan) -> bool:
    """Whether something of it is not on disk yet."""
    folder = plan.work / rival.name
    return not all((folder / f"{session.name}.json").exists() for session in sessions)


def play_rival(
    rival: Rival,
    sessions: Sequence[Session],
    plan: Plan,
    servers: Servers,
    after: Callable[[float], None] = lambda pause_s: None,
) -> None:
    """Play what is not on disk yet. Sessions that were cut off are played again from the start.
    after: called after each action, with the pause that it ended with.

    A cache that was filled by earlier sessions cannot be resumed: where some of a rival's sessions
    are missing, all of them are played again on an empty cache.
    """
    if not to_play(rival, sessions, plan):
        return
    folder = plan.work / rival.name
    folder.mkdir(parents=True, exist_ok=True)
    for session in sessions:
        (folder / f"{session.name}.json").unlink(missing_ok=True)
    with contextlib.ExitStack() as stack:
        store = open_store(rival, stack)
        runtime = servers.of(rival)
        import tritonclient.grpc as grpcclient

        client = stack.enter_context(grpcclient.InferenceServerClient(runtime.endpoints.grpc))
        before_s, before = cpu_s(runtime), counted(runtime)
        for session in sessions:
            play = rival.begin(client, session.clip, store, plan.max_error)
            rows, opening_ms = _play(play, session, plan, rival, after)
            after_s, now = cpu_s(runtime), counted(runtime)
            played = {
                "session": session.name,
                "suite": session.clip.suite,
                "source": session.source,
                "opening_ms": opening_ms,
                "cpu_s": after_s - before_s,
                "bytes": bytes_stored(runtime, store),
                "worldcache": {name: value - before.get(name, 0) for name, value in now.items()},
                "answers": rows,
            }
            before_s, before = after_s, now
            _write(folder / f"{session.name}.json", json.dumps(played).encode())


def _play(
    play: Play, session: Session, plan: Plan, rival: Rival, after: Callable[[float], None]
) -> tuple[list[dict[str, Any]], float]:
    """A row for each answer, and the ms that showing the first frames took."""
    judge_of, opening_ms = _Judge(session, plan, rival), 0.0
    for action in session.actions:
        if action.asks:
            reply = play.ask(action)
        else:
            shown_ms = play.watch(action)
            opening_ms = shown_ms if action.kind == "open" else opening_ms
        ends_s = time.perf_counter() + action.pause_s
        if action.asks:
            judge_of.add(action, reply)
        if plan.drain:
            play.settle()
        else:
            # Judging takes its time out of the pause.
            time.sleep(max(0.0, ends_s - time.perf_counter()))
        after(0.0 if plan.drain else action.pause_s)
    play.close(plan.drain)
    if rival.name == REFERENCE:
        _keep(plan.work / REFERENCE / f"{session.name}.npz", judge_of.replies)
    return judge_of.rows, opening_ms


class _Judge:
    """Makes a row of each answer of a session: what came, and how good it was."""

    def __init__(self, session: Session, plan: Plan, rival: Rival) -> None:
        self._session, self._plan, self._rival = session, plan, rival
        self._uncached: _Uncached | None = None
        if rival.name != REFERENCE:
            self._uncached = _Uncached(plan.work / REFERENCE, session)
        self._truth = None
        if plan.truths is not None:
            self._truth = plan.truths.of(session.clip, session.actions, session.whole)
        self._places = _places(session)
        self._earlier: dict[tuple[Any, ...], Controls] = {}
        self.rows: list[dict[str, Any]] = []
        self.replies: list[Reply] = []

    def add(self, action: Action, reply: Reply) -> None:
        number, row = len(self.rows), _row(action, reply, self._session, self._plan)
        # A prediction of the other camera's own is not to be compared with one carried over.
        alike = self._rival.carries or not action.view or self._session.clip.other is None
        if self._uncached is not None and alike:
            row |= asdict(judge(reply, self._uncached.reply(number), self._plan.scale))
        if self._truth is not None:
            row |= from_truth(reply, self._truth[number])
        controls = np.round(np.array(action.control) / _CELL).astype(int)
        cell = (self._places[number], *controls)
        before = self._earlier.setdefault(cell, reply.physics)
        row["contradicts"] = contradiction(reply.physics, before)
        self.rows.append(row)
        self.replies.append(reply)


def _row(action: Action, reply: Reply, session: Session, plan: Plan) -> dict[str, Any]:
    logits = reply.states[:, plan.logits : plan.logits + len(plan.operations)].mean(0)
    known = session.clip.operation in plan.operations
    return {
        "kind": action.kind,
        "mode": action.mode,
        "latency_ms": reply.latency_ms,
        "tier": reply.tier,
        "exact": reply.exact,
        "bound": reply.bound,
        "stages_ms": [round(float(ms), 3) for ms in reply.stages_ms],
        "operation_right": bool(plan.operations[int(logits.argmax())] == session.clip.operation)
        if known
        else None,
        "physics": [round(float(x), 5) for x in reply.physics[-1]],
    }


def _places(session: Session) -> list[bytes]:
    """For each question, the digest of the context it was asked in."""
    timeline, places = Timeline(), []
    for action in session.actions:
        if action.mode != "advance":
            timeline.follow(session.clip, action)
        if action.asks:
            places.append(timeline.digest())
        if action.mode == "advance":
            timeline.follow(session.clip, action)
    return places


class _Uncached:
    """The answers of the reference rival to the same session."""

    def __init__(self, folder: Path, session: Session) -> None:
        with np.load(folder / f"{session.name}.npz") as kept:
            self._kept = {name: kept[name] for name in kept.files}

    def reply(self, number: int) -> Reply:
        return Reply(
            latency_ms=0.0,
            frames=self._kept["frames"][number],
            states=self._kept["states"][number],
            physics=self._kept["physics"][number],
            tier="none",
            exact=True,
            bound=0.0,
            stages_ms=np.zeros(6, np.float32),
        )


def _keep(path: Path, replies: Sequence[Reply]) -> None:
    partial = path.with_suffix(".part")
    with partial.open("wb") as file:
        np.savez(
            file,
            frames=np.stack([reply.frames for reply in replies]),
            states=np.stack([reply.states for reply in replies]),
            physics=np.stack([reply.physics for reply in replies]),
        )
    partial.rename(path)


def _write(path: Path, data: bytes) -> None:
    partial = path.with_suffix(".part")
    partial.write_bytes(data)
    partial.rename(path)
