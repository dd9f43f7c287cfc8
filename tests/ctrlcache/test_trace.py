"""Traces: what is asked and stored is taken down, survives crashes, and is read as a replay."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cache_setting import ask, couplet, opened, scores_of
from hypothesis import given
from hypothesis import strategies as st

from ctrlcache.config import CacheConfig
from ctrlcache.errors import ConfigError, InvalidInput
from ctrlcache.key import digest
from ctrlcache.trace import Access, Recorder, Request, accesses, requests, write


def row(
    time_s: float, op: str, key: str, size: int = 0, cost: float = 0.0, **more: object
) -> Access:
    return Access(time_s, op, "", key, "couplet", size, cost, bool(more.get("hit", False)))


def test_what_the_cache_does_is_taken_down(tmp_path: Path) -> None:
    """Misses, stores, exact and near answers, and arrays: under the id of the record that answered,
    with its size and cost; a near answer names the neighbour."""
    file = tmp_path / "traces" / "a.jsonl"
    with opened(tmp_path) as setting:
        recorder = Recorder(file, now=lambda: 5.0)
        cache = setting.make(trace=recorder)
        made = couplet([0.1, 0.0, 0.0], cost_ms=7.5)
        array = np.arange(6, dtype=np.float32)
        cache.lookup(ask(made.control, session="me"))
        cache.admit(made, scores_of(made))
        cache.lookup(ask(made.control, session="me"))
        cache.lookup(ask([0.101, 0.0, 0.0], 0.1, session="me"))
        cache.get_blob(digest(b"slice"))
        cache.put_blob(digest(b"slice"), array, cost_ms=2.0)
        cache.get_blob(digest(b"slice"))
        recorder.close()
        stored = len(setting.memory.hot.get(made.id) or b"")
        held = len(setting.memory.hot.get(digest(b"slice")) or b"")
    key, other = made.id[:8].hex(), digest(b"slice")[:8].hex()
    assert accesses(file) == [
        Access(5.0, "get", "me", key, "couplet", 0, 0.0, False),
        Access(5.0, "put", "", key, "couplet", stored, 7.5, False),
        Access(5.0, "get", "me", key, "couplet", stored, 7.5, True),
        Access(5.0, "get", "me", key, "couplet", stored, 7.5, True),
        Access(5.0, "get", "", other, "array", 0, 0.0, False),
        Access(5.0, "put", "", other, "array", held, 2.0, False),
        Access(5.0, "get", "", other, "array", held, 2.0, True),
    ]


def test_what_was_there_before_the_recording_is_sized(tmp_path: Path) -> None:
    """A hit on a record that another process stored, or an earlier run, says its size and cost."""
    with opened(tmp_path) as setting:
        made = couplet([0.1, 0.0, 0.0], cost_ms=7.5)
        setting.cache.admit(made)
        recorder = Recorder(tmp_path / "t.jsonl")
        setting.make(trace=recorder).lookup(ask(made.control))
        recorder.close()
        [seen] = accesses(tmp_path / "t.jsonl")
        assert seen.size_bytes == len(setting.memory.hot.get(made.id) or b"")
        assert (seen.cost_ms, seen.hit) == (7.5, True)


def test_processes_share_a_file(tmp_path: Path) -> None:
    """Recorders of several processes append to one file, and every line stays whole."""
    file = tmp_path / "t.jsonl"
    code = (
        "import sys; from ctrlcache.trace import Recorder\n"
        "recorder = Recorder(sys.argv[1])\n"
        "for n in range(3000):\n"
        "    recorder.put(int(sys.argv[2]).to_bytes(1, 'big') * 8, 'x' * 50, n, 1.0)\n"
        "    if n % 100 == 0: recorder.flush()\n"
        "recorder.close()"
    )
    running = [subprocess.Popen([sys.executable, "-c", code, str(file), str(n)]) for n in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    rows = accesses(file)
    for n in range(3):
        mine = [row.size_bytes for row in rows if row.key == f"{n:02x}" * 8]
        assert sorted(mine) == list(range(3000))


def test_a_replay_knows_sizes_before_they_were_known() -> None:
    """A miss takes size and cost of the store that follows, or of what was there before; a store
    that a look-up stands for is not a step of its own, one that nobody asked for is."""
    rows = [
        row(1, "get", "a"),
        row(2, "put", "a", 100, 3.0),
        row(3, "put", "b", 50, 1.0),
        row(4, "get", "a", 100, 3.0, hit=True),
        row(5, "put", "a", 160, 3.5),
        row(6, "get", "a"),
        row(7, "get", "never"),
    ]
    assert list(requests(rows)) == [
        Request(1, "", "a", "couplet", 100, 3.0, True),
        Request(3, "", "b", "couplet", 50, 1.0, False),
        Request(4, "", "a", "couplet", 100, 3.0, True),
        Request(6, "", "a", "couplet", 160, 3.5, True),
    ]


_ROWS = st.lists(
    st.builds(
        Access,
        time_s=st.floats(0, 1e6).map(lambda x: round(x, 3)),
        op=st.sampled_from(["get", "put"]),
        session=st.text(max_size=5),
        key=st.sampled_from("abcdef"),
        kind=st.text(max_size=5),
        size_bytes=st.integers(0, 1 << 40),
        cost_ms=st.floats(0, 1e6).map(lambda x: round(x, 2)),
        hit=st.booleans(),
    )
)


@given(_ROWS)
def test_any_trace_is_read_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Access]
) -> None:
    """Compressed or not; and no replay asks for more than was asked."""
    folder = tmp_path_factory.mktemp("trace")
    for name in ("t.jsonl", "t.jsonl.gz"):
        write(folder / name, rows)
        assert accesses(folder / name) == sorted(rows, key=lambda row: row.time_s)
    made = list(requests(accesses(folder / "t.jsonl")))
    assert sum(r.asked for r in made) <= sum(r.op == "get" for r in rows)
    assert all(r.size_bytes > 0 for r in made)


def test_damaged_traces_are_told(tmp_path: Path) -> None:
    """A line that a crash cut off at the end is passed over; any other is an error with its number
    and what is wrong with it."""
    file = tmp_path / "t.jsonl"
    write(file, [row(1, "put", "a", 10, 1.0), row(2, "get", "a", 10, 1.0, hit=True)])
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    assert [r.op for r in accesses(file)] == ["put"]
    wrong = json.loads(whole.splitlines()[0]) | {"size_bytes": "many"}
    file.write_bytes(whole + json.dumps(wrong).encode() + b"\n" + whole)
    with pytest.raises(InvalidInput, match="line 3: size_bytes must be"):
        accesses(file)
    file.write_text('{"op": "get"}\n')
    with pytest.raises(InvalidInput, match="line 1: expected an object with time_s, op"):
        accesses(file)


def test_a_file_that_cannot_be_written_ends_only_the_recording(tmp_path: Path) -> None:
    """To begin with that is a wrong setting; later nothing is raised at whoever reports."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot record a trace in"):
        Recorder(tmp_path / "file" / "t.jsonl")
    recorder = Recorder("/dev/full")
    recorder.put(b"12345678", "couplet", 1, 1.0)
    recorder.flush()
    recorder.put(b"12345678", "couplet", 1, 1.0)
    recorder.close()


def test_the_setting_names_the_file() -> None:
    """`trace_file` among the parameters of a model; nothing is recorded without it."""
    assert CacheConfig.from_mapping({}).trace.file is None
    assert CacheConfig.from_mapping({"trace_file": "/a/b"}).trace.file == Path("/a/b")
