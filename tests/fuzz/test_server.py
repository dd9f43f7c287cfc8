"""A long run of strange requests against the real server: no crash, no hang, no leak, no harm.

`CTRLCACHE_FUZZ=50000` (`make fuzz`) sends that many; the seed is printed, and
`CTRLCACHE_FUZZ_SEED` repeats it.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from strange import Stranger
from tiny_world import HELD, TINY, clip
from wire import Wire

from worldserve.runtime import Runtime, RuntimeConfig

pytestmark = pytest.mark.server

COUNT = int(os.environ.get("CTRLCACHE_FUZZ", "1500"))
SEED = int(
    os.environ.get("CTRLCACHE_FUZZ_SEED", "1" if COUNT < 10_000 else random.randrange(10**6))
)
STRANGERS = 4
REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"


class Watch:
    """What the server's processes hold: RssAnon (MB), files in /dev/shm (MB), descriptors."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        [stub] = runtime.stubs("world_model")
        self.pids = {"server": runtime.server_pid, "stub": stub.pid}

    def fault(self) -> str:
        """What has happened to the processes, '' where they live."""
        if not self._runtime.alive:
            return "the server died"
        stubs = self._runtime.stubs("world_model")
        return "" if [p.pid for p in stubs] == [self.pids["stub"]] else f"the stub died: {stubs}"

    def log(self) -> str:
        """The end of the log, without what protobuf says of every damaged text."""
        lines = self._runtime.log_tail(5000).splitlines()
        return "\n".join([line for line in lines if "libprotobuf" not in line][-40:])

    def look(self) -> dict[str, float]:
        seen: dict[str, float] = {}
        for name, pid in self.pids.items():
            status = Path(f"/proc/{pid}/status").read_text()
            seen[f"{name}_rss_mb"] = int(status.split("RssAnon:")[1].split()[0]) / 1024
            seen[f"{name}_files"] = len(os.listdir(f"/proc/{pid}/fd"))
        shm = self._runtime.config.shm.glob(f"ctrlcache-{self._runtime.run_id}*")
        paths = [path for top in shm for path in (top.rglob("*") if top.is_dir() else [top])]
        seen["shm_mb"] = (
            sum(path.stat().st_blocks * 512 for path in paths if path.is_file()) / 2**20
        )
        return seen


def test_strange_requests_do_no_harm(tmp_path):
    """Valid, nearly valid and malformed requests from four sides at once, by gRPC, HTTP and as raw
    bytes. Both processes live, nothing grows, and other people's sessions are bit-equal."""
    config = RuntimeConfig.aside(
        REPOSITORY,
        run_dir=tmp_path / "run",  # its log tells what a fault was
        parameters={
            "world_model_class": TINY,
            "hot_size_bytes": "128MiB",
            "history_frames": "64",
            "max_sessions": "100",
        },
    )
    with Runtime(config) as runtime:
        wire, watch = Wire(runtime.endpoints, "grpc"), Watch(runtime)
        for number in range(3):
            wire.ask(HELD, f"bystander-{number}", frames=clip(3, seed=number), start=True)
        before = [wire.ask(-HELD, f"bystander-{n}", cache="off") for n in range(3)]
        outcomes, looks, took_s = bombard(runtime, watch)
        report(outcomes, looks, took_s)
        # In a long run the batcher has given their places away.
        names = [f"bystander-{n}" for n in range(3)]
        back = {name: {"start": True, "resume": name, "cache": "off"} for name in names}
        after = [wire.ask(-HELD, name, **back[name]) for name in names]
        wire.close()
    for one, two in zip(before, after, strict=True):
        assert np.array_equal(one["STATE"], two["STATE"])
        assert np.array_equal(one["PREDICTED_FRAMES"], two["PREDICTED_FRAMES"])
    assert sum(outcomes.values()) >= COUNT
    assert outcomes["grpc valid", "answered"] > COUNT * 0.1
    assert outcomes["http valid", "answered"] > COUNT * 0.03
    # Once warm, nothing grows: within what allocators and caches round up to.
    warm, last = looks[len(looks) // 3], looks[-1]
    for name in ("server", "stub"):
        assert last[f"{name}_rss_mb"] < 1.15 * warm[f"{name}_rss_mb"] + 24, (name, looks)
        assert last[f"{name}_files"] <= warm[f"{name}_files"] + 24, (name, looks)
    assert last["shm_mb"] <= max(warm["shm_mb"] + 8, 140), looks


def bombard(runtime, watch):
    """All strangers at once; (outcomes by kind, looks at the processes, seconds)."""
    outcomes: Counter[tuple[str, str]] = Counter()
    failures: list[str] = []
    looks = [watch.look()]
    began = time.monotonic()
    strangers = [Stranger(runtime.endpoints, SEED * STRANGERS + n) for n in range(STRANGERS)]

    def work(stranger: Stranger) -> None:
        try:
            for _ in range(-(-COUNT // STRANGERS)):
                if failures:
                    return
                kind, outcome = stranger.send()
                outcomes[kind, outcome] += 1
        except Exception as error:
            failures.append(f"{type(error).__name__}: {error}")
        finally:
            stranger.close()

    threads = [threading.Thread(target=work, args=(stranger,)) for stranger in strangers]
    for thread in threads:
        thread.start()
    step = COUNT // 20
    while any(thread.is_alive() for thread in threads):
        time.sleep(0.05)
        if fault := watch.fault():
            failures.append(f"{fault}; sent last: {[one.last[:1500] for one in strangers]}")
            break
        if sum(outcomes.values()) >= step * len(looks):
            looks.append(watch.look())
    for thread in threads:
        thread.join()
    took_s = time.monotonic() - began
    if failures:
        pytest.fail(
            "\n".join([*failures, f"CTRLCACHE_FUZZ_SEED={SEED}", watch.log()]), pytrace=False
        )
    looks.append(watch.look())
    return outcomes, looks, took_s


def report(outcomes, looks, took_s):
    total = sum(outcomes.values())
    print(f"\n{total} requests in {took_s:.0f} s ({total / took_s:.0f}/s), seed {SEED}")
    for (kind, outcome), count in sorted(outcomes.items()):
        print(f"  {kind:20} {count:7}  {outcome}")
    for name in looks[0]:
        values = [look[name] for look in looks]
        print(
            f"  {name:16}"
            + " ".join(f"{value:7.1f}" for value in values[:: max(1, len(values) // 8)])
        )
