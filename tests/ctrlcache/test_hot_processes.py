"""The hot tier in several processes and threads: shared, and whole whoever is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
from hot_setting import SIZE, WRITER, check_accounts, fill, record
from shared_writer import KEPT, slice_record

from ctrlcache.key import digest
from ctrlcache.shared import SharedMemory


def start(place: Path, seed: int, *more: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(WRITER), str(place), str(SIZE), str(seed), *more]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def test_processes_share_it(memory: SharedMemory, place: Path) -> None:
    """What two processes write, at the same time, a third one sees at once; the sums are right."""
    writers = [start(place, seed, "150") for seed in (1, 2)]
    for n in range(150):
        memory.transact(lambda tx, n=n: tx.write("sessions", b"own", b"%d" % n))
    for seed, writer in enumerate(writers, 1):
        lines = writer.communicate(timeout=120)[0].split()
        assert lines == [str(n) for n in range(150)]
        assert memory.table("sessions").get(b"session %d" % seed) == b"149"
        held = [slice_record(seed, n).entry.id for n in range(150 - KEPT, 150)]
        assert sorted(memory.hot.pinned(b"session %d" % seed)) == sorted(held)
        assert all(memory.hot.contains(held))
    assert memory.table("sessions").get(b"own") == b"149"
    check_accounts(memory)


def test_a_killed_process_leaves_whole_transactions(memory: SharedMemory, place: Path) -> None:
    """Killed at arbitrary moments: its last reported commit is there whole, pins included, counts
    are right, and others write on at once."""
    rng = np.random.default_rng(0)
    for seed in range(10):
        writer = start(place, seed)
        assert writer.stdout is not None
        for _ in range(int(rng.integers(1, 40))):
            line = writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read().split()
        writer.wait()
        reported = int(rest[-1] if rest else line)
        last = int(memory.table("sessions").get(b"session %d" % seed) or b"-1")
        assert last in (reported, reported + 1)
        held = [slice_record(seed, n) for n in range(max(0, last - KEPT + 1), last + 1)]
        pinned = memory.hot.pinned(b"session %d" % seed)
        assert sorted(pinned) == sorted(item.entry.id for item in held)
        assert all(memory.hot.get(item.entry.id) == item.payload for item in held)
        memory.hot.put([record(f"afterwards {seed}")])
        check_accounts(memory)


def test_readers_that_died_are_forgotten(memory: SharedMemory, place: Path) -> None:
    """A process killed in the middle of reading keeps no pages for ever."""
    memory.hot.put([record("something")])
    code = (
        "import lmdb, sys, time\n"
        "env = lmdb.open(sys.argv[1], map_size=int(sys.argv[2]), max_dbs=20)\n"
        "txn = env.begin(); print('reading', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", code, str(place), str(SIZE)]
    reader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert reader.stdout is not None
    assert reader.stdout.readline() == "reading\n"
    reader.kill()
    reader.wait()
    fill(memory)  # many times what fits beside the pages that the dead reader saw
    assert memory.reader_check() == 0
    check_accounts(memory)


def test_threads_write_at_once(memory: SharedMemory) -> None:
    """Threads of one process take turns; nothing is lost or counted twice."""

    def write(seed: int) -> None:
        for n in range(40):
            memory.hot.put([record(f"{seed} {n}", 3000)])
            memory.hot.touch([digest(b"%d %d" % (seed, n))])

    threads = [threading.Thread(target=write, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    memory.hot.flush_touches()
    assert memory.hot.stats().entries == 160
    check_accounts(memory)
