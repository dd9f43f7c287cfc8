"""The servers and stores behind the rivals, and what they say of themselves."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.request import urlopen

from worldserve.bench.rivals import RIVALS, Rival
from worldserve.bench.stores import DictStore, Store, redis_server
from worldserve.bench.workload import Action, Clip
from worldserve.processes import run_processes
from worldserve.runtime import Runtime, RuntimeConfig

__all__ = ["Counters", "Servers", "bytes_stored", "counted", "cpu_s", "open_store"]

_REDIS_BYTES = 256 << 20
_TICKS = os.sysconf("SC_CLK_TCK")
#: Of WorldCache, by labels: what happened since the server started.
_COUNTED = {"worldcache_lookups": ("result",), "worldcache_blocks": ("decision",)}

Counters = dict[str, float]


class Servers:
    """One server at a time: each rival gets one of its own with an empty cache.

    share: rivals that leave the server's cache alone, and want the same of it, may follow each
    other on one server. settings: of the model, for all rivals.
    """

    def __init__(
        self, repository: Path, settings: Mapping[str, str], clip: Clip, share: bool = False
    ) -> None:
        self._repository, self._settings, self._clip = repository, dict(settings), clip
        self._share = share
        self._running: Runtime | None = None
        self._last: Rival | None = None

    def of(self, rival: Rival) -> Runtime:
        """StartFailed, ConfigError: it cannot be started, and why."""
        last = self._last
        alike = last is not None and not (last.cached or rival.cached)
        if self._running is not None and self._share and alike:
            assert last is not None
            if dict(last.settings) == dict(rival.settings):
                self._last = rival
                return self._running
        self.close()
        config = RuntimeConfig.aside(
            self._repository,
            parameters={**self._settings, **rival.settings},
        )
        runtime = Runtime(config)
        runtime.start()
        self._running, self._last = runtime, rival
        self._warm_up(runtime)
        return runtime

    def _warm_up(self, runtime: Runtime) -> None:
        """A process's first requests pay for code that is loaded on demand: not the rival's."""
        import tritonclient.grpc as grpcclient

        still = (0.0,) * self._clip.controls.shape[1]
        with grpcclient.InferenceServerClient(runtime.endpoints.grpc) as client:
            for _ in range(3):
                play = RIVALS["recompute"].begin(client, self._clip, None, 0.0)
                play.ask(Action("warm-up", "probe", still, 0.0, watched=(0, 8)))

    def close(self) -> None:
        if self._running is not None:
            self._running.stop()
        self._running = self._last = None

    def __enter__(self) -> Servers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_store(rival: Rival, stack: contextlib.ExitStack) -> Store | None:
    """What stands in front of the rival's server, empty."""
    if rival.store == "redis":
        return stack.enter_context(redis_server(_REDIS_BYTES))
    return DictStore() if rival.store == "dict" else None


def cpu_s(runtime: Runtime) -> float:
    """CPU seconds of all processes of a run so far."""
    total = 0.0
    for process in run_processes(runtime.run_id):
        with contextlib.suppress(OSError, IndexError):
            stat = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            total += (int(stat[11]) + int(stat[12])) / _TICKS
    return total


def bytes_stored(runtime: Runtime, store: Store | None) -> dict[str, float]:
    """What is stored, by tier and level, as the server's metrics say; and in the store in front."""
    found: dict[str, float] = {}
    for sample in _samples(runtime):
        if sample.name == "ctrlcache_bytes":
            found[sample.labels.get("tier", "?")] = sample.value
        if sample.name == "worldcache_store_bytes":
            found[sample.labels.get("level", "?")] = sample.value
    if store is not None:
        found[store.name] = float(store.bytes_used)
    return found


def counted(runtime: Runtime) -> Counters:
    """What WorldCache has done since the server started: {"lookups hit": 3.0, ...}."""
    found: Counters = {}
    for sample in _samples(runtime):
        family = sample.name.removesuffix("_total")
        if family in _COUNTED:
            labels = (sample.labels[name] for name in _COUNTED[family])
            name = " ".join((family.removeprefix("worldcache_"), *labels))
            found[name] = found.get(name, 0.0) + sample.value
    return found


def _samples(runtime: Runtime) -> list[Any]:
    from prometheus_client.parser import text_string_to_metric_families

    with urlopen(f"http://{runtime.endpoints.metrics}/metrics", timeout=10) as page:
        text = page.read().decode()
    return [s for family in text_string_to_metric_families(text) for s in family.samples]
