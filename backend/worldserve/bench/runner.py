"""Play sessions against rivals, and keep what each answer was: one file per session, resumable.

For each rival a server of its own is started, with an empty cache; sessions follow each other as
users would. The first rival, `stateful`, gives the uncached answer to every question; all others
are judged against it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from worldserve.bench.judge import contradiction, from_truth, judge
from worldserve.bench.rivals import RIVALS, Play, Rival
from worldserve.bench.stores import DictStore, Store, redis_server
from worldserve.bench.timeline import Timeline
from worldserve.bench.truth import Truths
from worldserve.bench.wire import Reply
from worldserve.bench.workload import Action, Clip, Controls
from worldserve.processes import run_processes
from worldserve.runtime import Runtime, RuntimeConfig

__all__ = ["REFERENCE", "Plan", "Session", "play_rival"]

#: The rival whose answers are the uncached ones.
REFERENCE = "stateful"
_REDIS_BYTES = 256 << 20
_CELL = 0.05
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, eq=False)
class Session:
    """One user on one clip. source: `model` for modelled users, else the recording's name."""

    clip: Clip
    user: int
    source: str
    actions: Sequence[Action] = field(repr=False)

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


def play_rival(
    rival: Rival,
    sessions: Sequence[Session],
    plan: Plan,
    on_question: Callable[[], None] = lambda: None,
) -> None:
    """Play what is not on disk yet. Sessions that were cut off are played again from the start.

    A cache that was filled by earlier sessions cannot be resumed: where some of a rival's sessions
    are missing, all of them are played again on an empty cache.
    """
    folder = plan.work / rival.name
    folder.mkdir(parents=True, exist_ok=True)
    if all((folder / f"{session.name}.json").exists() for session in sessions):
        for session in sessions:
            for _ in range(session.questions):
                on_question()
        return
    with contextlib.ExitStack() as stack:
        store = _store(rival, stack)
        runtime = stack.enter_context(_server(rival, plan))
        import tritonclient.grpc as grpcclient

        client = stack.enter_context(grpcclient.InferenceServerClient(runtime.endpoints.grpc))
        _warm_up(client, sessions[0].clip)
        for session in sessions:
            before_s = _cpu_s(runtime)
            play = rival.begin(client, session.clip, store, plan.max_error)
            rows = _play(play, session, plan, folder, rival.name == REFERENCE, on_question)
            played = {
                "session": session.name,
                "suite": session.clip.suite,
                "source": session.source,
                "cpu_s": _cpu_s(runtime) - before_s,
                "bytes": _bytes(runtime, store),
                "answers": rows,
            }
            _write(folder / f"{session.name}.json", json.dumps(played).encode())


def _play(
    play: Play,
    session: Session,
    plan: Plan,
    folder: Path,
    is_reference: bool,
    on_question: Callable[[], None],
) -> list[dict[str, Any]]:
    uncached = None if is_reference else _Uncached(plan.work / REFERENCE, session)
    rows: list[dict[str, Any]] = []
    replies: list[Reply] = []
    earlier: dict[tuple[Any, ...], Controls] = {}
    places = _places(session)
    truth = None if plan.truths is None else plan.truths.of(session.clip, session.actions)
    for action in session.actions:
        if not action.asks:
            play.watch(action)
        else:
            reply = play.ask(action)
            row = _row(action, reply, session, plan)
            number = len(replies)
            if uncached is not None:
                row |= asdict(judge(reply, uncached.reply(number), plan.scale))
            if truth is not None:
                row |= from_truth(reply, truth[number])
            cell = (places[number], *np.round(np.array(action.control) / _CELL).astype(int))
            row["contradicts"] = cell in earlier and contradiction(reply.physics, earlier[cell])
            earlier.setdefault(cell, reply.physics)
            rows.append(row)
            replies.append(reply)
            on_question()
        if plan.drain:
            play.settle()
        else:
            time.sleep(action.pause_s)
    play.close()
    if is_reference:
        _keep(folder / f"{session.name}.npz", replies)
    return rows


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


@contextlib.contextmanager
def _server(rival: Rival, plan: Plan) -> Iterator[Runtime]:
    config = RuntimeConfig(
        model_repository=plan.repository,
        models=("world_model",),
        cold="none",
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        parameters={**plan.settings, **rival.settings},
    )
    with Runtime(config) as runtime:
        yield runtime


def _store(rival: Rival, stack: contextlib.ExitStack) -> Store | None:
    if rival.store == "redis":
        return stack.enter_context(redis_server(_REDIS_BYTES))
    return DictStore() if rival.store == "dict" else None


def _warm_up(client: Any, clip: Clip) -> None:
    """The first request of a process pays for code that is loaded on demand: not the rival's."""
    for _ in range(3):
        play = RIVALS["recompute"].begin(client, clip, None, 0.0)
        play.ask(Action("warm-up", "probe", (0.0,) * clip.controls.shape[1], 0.0, watched=(0, 8)))


def _cpu_s(runtime: Runtime) -> float:
    """CPU seconds of all processes of a run so far."""
    total = 0.0
    for process in run_processes(runtime.run_id):
        with contextlib.suppress(OSError, IndexError):
            stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(stat[11]) + int(stat[12])) / _TICKS
    return total


def _bytes(runtime: Runtime, store: Store | None) -> dict[str, float]:
    """What is stored, by tier, as the server's metrics say; and in the store in front."""
    from urllib.request import urlopen

    from prometheus_client.parser import text_string_to_metric_families

    with urlopen(f"http://{runtime.endpoints.metrics}/metrics", timeout=10) as page:
        text = page.read().decode()
    found = {
        sample.labels.get("tier", "?"): sample.value
        for family in text_string_to_metric_families(text)
        if family.name == "ctrlcache_bytes"
        for sample in family.samples
    }
    if store is not None:
        found[store.name] = float(store.bytes_used)
    return found
