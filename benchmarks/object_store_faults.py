"""What the interactive path notices of an object store in trouble: its latency, fault by fault.

    python benchmarks/object_store_faults.py [--rounds 3] [--hits 150] [--computed 10] [--tiny]

A real server, a real MinIO gateway, and a relay between them. One session asks through the
ensemble `interactive_world`, naming a task that nobody has named before in every request, so that
the cold step always wants something of the store: questions whose answer is in the hot tier, and
questions that must be computed. In each round the store is well, killed (kill -9), started again,
slow (5 s before each reply), answering rubbish, refusing the server's key, and without its bucket;
the rounds begin and end with a store that is well.

Reported: latency by the client's clock, p50 and p99 of each round, medians over the rounds; and
what the server counted of its requests to the store. Last of all: how long after a fault has ended
the store is used again, with nobody doing anything about it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from worldserve.bench.report import machine
from worldserve.runtime import ColdStore, Runtime, RuntimeConfig

PROJECT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(PROJECT / "tests" / "shared"), str(PROJECT / "tests" / "server")]

import misbehaviour  # noqa: E402  these are the tests' own
import object_store  # noqa: E402
from wire import Wire, metric  # noqa: E402

BUCKET = "ctrlcache-templates"
RESULTS = ("hit", "miss", "timeout", "unreachable", "denied", "no_bucket", "garbage", "error")
REPLY_S = 5.0
_RECOVERY_S = 120.0
Treat = Callable[[socket.socket], None]


class Trouble:
    """The store, what is between it and the server, and everything that can go wrong with it."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.store = object_store.start(self._made(directory / "store"))
        stack.callback(self.store.stop)
        object_store.objects(self.store, BUCKET).ensure_bucket()
        self._foreign = object_store.start(self._made(directory / "foreign"))
        stack.callback(self._foreign.stop)
        self._empty = object_store.start(self._made(directory / "empty"))
        stack.callback(self._empty.stop)
        self._treat: Treat = self._pass_on
        self._connections: set[socket.socket] = set()
        self.port = stack.enter_context(object_store.serving(self._meet))

    @staticmethod
    def _made(directory: Path) -> Path:
        directory.mkdir()
        return directory

    @contextmanager
    def well(self) -> Iterator[None]:
        yield

    @contextmanager
    def killed(self) -> Iterator[None]:
        assert self.store.pid is not None
        os.kill(self.store.pid, signal.SIGKILL)
        self.store.stop()
        yield

    @contextmanager
    def restarted(self) -> Iterator[None]:
        self.store.start()
        yield

    @contextmanager
    def slow(self) -> Iterator[None]:
        def late(connection: socket.socket) -> None:
            request = connection.recv(1 << 16)
            time.sleep(REPLY_S)
            with socket.create_connection(("127.0.0.1", _port(self.store.endpoint))) as upstream:
                upstream.sendall(request)
                connection.sendall(upstream.recv(1 << 16))

        with self._treating(late):
            yield

    @contextmanager
    def rubbish(self) -> Iterator[None]:
        with self._treating(misbehaviour.rubbish):
            yield

    @contextmanager
    def wrong_key(self) -> Iterator[None]:
        """A store that does not know the server's key."""
        with self._treating(object_store.forward(_port(self._foreign.endpoint))):
            yield

    @contextmanager
    def no_bucket(self) -> Iterator[None]:
        """The same key, and no bucket."""
        self._empty.stop()
        self._empty.credentials = self.store.credentials
        self._empty.start()
        with self._treating(object_store.forward(_port(self._empty.endpoint))):
            yield

    @contextmanager
    def _treating(self, treat: Treat) -> Iterator[None]:
        self._change(treat)
        try:
            yield
        finally:
            self._change(self._pass_on)

    def _change(self, treat: Treat) -> None:
        """From now on; connections that are open would go on as they were begun."""
        self._treat = treat
        for connection in list(self._connections):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def _meet(self, connection: socket.socket) -> None:
        self._connections.add(connection)
        try:
            self._treat(connection)
        finally:
            self._connections.discard(connection)

    def _pass_on(self, connection: socket.socket) -> None:
        object_store.forward(_port(self.store.endpoint))(connection)


def _port(endpoint: str) -> int:
    return int(endpoint.rsplit(":", 1)[1])


class User:
    """One session, whose every request names a task of its own."""

    def __init__(self, runtime: Runtime, seed: int, controls: int) -> None:
        self._wire = Wire(runtime.endpoints, "grpc", "interactive_world")
        self._draw = np.random.default_rng(seed)
        self._id = f"user-{seed}"
        self._tasks = 0
        with np.load(PROJECT / "client_examples" / "clips" / "door-open.npz") as clip:
            self._frames, self._controls = clip["frames"][:8], clip["controls"][:8, :controls]
        self._held = np.linspace(0.1, 0.4, controls, dtype=np.float32)

    def begin(self) -> None:
        """Enters the session; from then on the answer for the held control is known."""
        self._ask(self._controls, start=True, frames=self._frames)
        for _ in range(20):
            self._ask(self._held)

    def known(self) -> float:
        """Milliseconds that a question takes whose answer is in the hot tier."""
        took_ms, tier = self._ask(self._held)
        assert tier == "hot", tier
        return took_ms

    def computed(self) -> float:
        """And one whose answer must be computed."""
        control = self._draw.uniform(-0.8, 0.8, len(self._held)).astype(np.float32)
        took_ms, tier = self._ask(control)
        assert tier == "none", tier
        return took_ms

    def _ask(self, control: Any, **more: Any) -> tuple[float, str]:
        self._tasks += 1
        task = f"task-{self._id}-{self._tasks}"
        began = time.perf_counter()
        got = self._wire.ask(
            control, self._id, ["STATE", "CACHE_TIER"], task=task, max_error="0", **more
        )
        return (time.perf_counter() - began) * 1e3, got["CACHE_TIER"][0].decode()


def counted(runtime: Runtime) -> Counter[str]:
    """Requests to the store by result, of all of the server's models."""
    name = "ctrlcache_cold_requests_total"
    return Counter(
        {result: int(metric(runtime.endpoints, name, result=result) or 0) for result in RESULTS}
    )


def measure(runtime: Runtime, user: User, hits: int, computed: int) -> dict[str, Any]:
    before = counted(runtime)
    spaced_s = 10.0 / max(hits, 1)  # long enough for the store to be asked several times
    times: dict[str, list[float]] = {"known": [], "computed": []}
    for number in range(hits):
        times["known"].append(user.known())
        if computed and number % max(1, hits // computed) == 0:
            times["computed"].append(user.computed())
        time.sleep(spaced_s)
    asked = counted(runtime)
    asked.subtract(before)
    made: dict[str, Any] = {"requests": {name: count for name, count in asked.items() if count}}
    for kind, ms in times.items():
        made |= {f"{kind}_{q}": float(np.percentile(ms, q)) for q in (50, 99)}
    return made


def recovery_s(runtime: Runtime, user: User) -> float:
    """Until the store has given a proper reply again."""
    began = time.monotonic()
    before = counted(runtime)
    while time.monotonic() - began < _RECOVERY_S:
        user.known()
        now = counted(runtime)
        if now["hit"] + now["miss"] > before["hit"] + before["miss"]:
            return time.monotonic() - began
        time.sleep(0.1)
    raise AssertionError(f"the store was not used again within {_RECOVERY_S:.0f} s")


CONDITIONS = (
    "well", "killed", "restarted", "slow", "rubbish", "wrong_key", "no_bucket", "well again",
)  # fmt: skip


def run(args: argparse.Namespace, console: Console) -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm")))
        trouble = Trouble(directory, stack)
        settings = {"cold_min_confidence": "0", "background": str(args.background).lower()}
        if args.tiny:
            settings["world_model_class"] = "worldserve.models.tiny:TinyWorldModel"
        config = RuntimeConfig(
            model_repository=PROJECT / "model_repository",
            http_port=0,
            grpc_port=0,
            metrics_port=0,
            parameters=settings,
            cold=ColdStore(
                f"127.0.0.1:{trouble.port}", False, directory / "store" / "credentials.json"
            ),
        )
        runtime = stack.enter_context(Runtime(config))
        user = User(runtime, 1, controls=2 if args.tiny else 4)
        user.begin()
        for round in range(args.rounds):
            for condition in CONDITIONS:
                with getattr(trouble, condition.split()[0])():
                    made = measure(runtime, user, args.hits, args.computed)
                    if condition in ("restarted", "well again"):
                        made["back_after_s"] = recovery_s(runtime, user)
                    found[condition].append(made)
                console.print(f"round {round + 1}, {condition}: {made}", highlight=False)
    return found


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    names = ("known_50", "known_99", "computed_50", "computed_99", "back_after_s")
    row: dict[str, Any] = {
        name: statistics.median(made[name] for made in rounds)
        for name in names
        if all(name in made for made in rounds)
    }
    total: Counter[str] = Counter()
    for made in rounds:
        total.update(made["requests"])
    return {**row, "requests": dict(total), "rounds": rounds}


def show(report: dict[str, Any], console: Console) -> None:
    table = Table(
        "the store is", "known p50", "p99 ms", "computed p50", "p99 ms", "asked of it", "back after"
    )
    for condition, row in report["conditions"].items():
        asked = ", ".join(f"{count} {result}" for result, count in row["requests"].items())
        back = f"{row['back_after_s']:.1f} s" if "back_after_s" in row else ""
        numbers = [f"{row[k]:.2f}" for k in ("known_50", "known_99", "computed_50", "computed_99")]
        table.add_row(condition.replace("_", " "), *numbers, asked or "nothing", back)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hits", type=int, default=300, help="known answers per round and state")
    parser.add_argument("--computed", type=int, default=20, help="computed answers, likewise")
    parser.add_argument("--tiny", action="store_true", help="the tiny model: for a quick look")
    parser.add_argument("--background", action="store_true", help="with work in thinking time")
    parser.add_argument(
        "--json", type=Path, default=Path(__file__).parent / "results/object_store_faults.json"
    )
    args = parser.parse_args()
    console = Console()
    report: dict[str, Any] = {
        "machine": machine(),
        "load_before": os.getloadavg()[0],
        "model": "tiny" if args.tiny else "reference",
        "settings": {"rounds": args.rounds, "hits": args.hits, "computed": args.computed},
    }
    found = run(args, console)
    report["conditions"] = {name: summary(found[name]) for name in CONDITIONS}
    show(report, console)
    args.json.parent.mkdir(exist_ok=True)
    args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
