"""The commands on stored couplets, as a user calls them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import object_store
import pytest
from test_templates import PROVENANCE, as_record, couplet

from ctrlcache.cli import main
from ctrlcache.key import digest
from ctrlcache.templates import prefix
from ctrlcache.tiers import segments
from ctrlcache.tiers.warm import WarmTier

COUNT = 40
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def tier(tmp_path: Path, index: Path) -> Iterator[WarmTier]:
    tier = WarmTier(tmp_path / "warm", index, limit_bytes=64 << 20, follow_s=0.05)
    made = [couplet(np.full(4, n / COUNT), seed=n, space=digest(b"%d" % n)) for n in range(COUNT)]
    tier.put([as_record(item) for item in made])
    tier.touch([made[0].id] * 3)
    yield tier
    tier.close()


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs `ctrlcache ...`: (status, stdout, stderr)."""

    def call(*arguments: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    return call


def test_stats(tier: WarmTier, run: Run) -> None:
    """Entries, bytes and all histograms, of a directory that is in use."""
    tier.close()
    status, out, _ = run("stats", tier.directory, "--json")
    assert status == 0
    found = json.loads(out)
    assert (found["entries"], found["couplets"], found["quarantined"]) == (COUNT, COUNT, 0)
    assert (found["spaces"], found["sampled"], found["scored"]) == (COUNT, COUNT, COUNT)
    names = {"stability", "transferability", "radius", "hits", "couplets per cell"}
    assert set(found["histograms"]) == names
    for histogram in found["histograms"].values():
        assert sum(histogram["counts"]) == COUNT
    assert found["histograms"]["hits"]["edges"][-1] == pytest.approx(3.0, abs=0.01)
    status, out, _ = run("stats", tier.directory)
    assert status == 0
    assert f"{COUNT} records ({COUNT} couplets" in out
    assert "transferability: median" in out
    assert "2% of the records were used" in out


def test_stats_of_what_is_new(tmp_path: Path, run: Run) -> None:
    """Couplets that nobody has scored or used yet: said so, without empty tables."""
    index = tmp_path / "index"
    tier = WarmTier(tmp_path / "warm", index, limit_bytes=64 << 20, follow_s=None)
    blank = replace(couplet(np.zeros(4)), transferability=np.nan, stability=np.nan, radius=0.0)
    tier.put([as_record(blank)])
    tier.close()
    status, out, _ = run("stats", tmp_path / "warm")
    assert status == 0
    assert "of 1 that were read, 0 have been scored" in out
    assert "stability: none yet" in out
    assert "radius: median 0" in out


def test_verify(tier: WarmTier, run: Run) -> None:
    """All is well; then one byte changes, and it is named, with status 1."""
    status, out, _ = run("verify", tier.directory)
    assert (status, f"{COUNT} records intact" in out) == (0, True)
    path = segments.segment_path(tier.directory, 1)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 8
    path.write_bytes(data)
    status, out, _ = run("index", "verify", tier.directory, "--json")
    assert status == 1
    found = json.loads(out)
    assert found["records"] == COUNT - 1
    assert [item["segment"] for item in found["damage"]] == [1]
    status, out, _ = run("verify", tier.directory)
    assert (status, "checksum is wrong" in out) == (1, True)


def test_index_rebuild_of_a_stopped_server(tier: WarmTier, index: Path, run: Run) -> None:
    """Without a server the command makes the index; the records are found afterwards."""
    assert tier.index is not None
    tier.index.forget([entry.id for entry in tier.scan()])
    assert tier.stats().entries == 0
    tier.close()
    status, out, _ = run("index", "rebuild", tier.directory, "--index", index)
    assert (status, out.startswith(f"{COUNT} records")) == (0, True)


def test_index_rebuild_beside_a_running_server(index: Path, tmp_path: Path, run: Run) -> None:
    """The server that keeps the index is asked to make it anew, and does."""
    script = Path(__file__).with_name("warm_process.py")
    at = ("write", tmp_path / "warm", index, 1, 64 << 20, 128 << 10)
    server = subprocess.Popen(
        [sys.executable, script, *map(str, at)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    try:
        assert server.stdout is not None
        assert server.stdout.readline().startswith(b"open writer")
        drain = threading.Thread(target=server.stdout.read)
        drain.start()
        status, out, _ = run("index", "rebuild", tmp_path / "warm", "--index", index)
        assert (status, "records in the index" in out) == (0, True)
        assert server.poll() is None
    finally:
        server.kill()
        server.wait()
        drain.join()
        server.stdout.close()


def test_backup_and_restore(tier: WarmTier, tmp_path: Path, run: Run) -> None:
    """A backup, a deletion, and back again, under the nose of the server."""
    ids = [entry.id for entry in tier.scan()]
    assert run("backup", tier.directory, tmp_path / "copy")[0] == 0
    tier.delete(ids)
    status, out, _ = run("restore", tmp_path / "copy", tier.directory)
    assert (status, "warm.before-" in out) == (0, True)
    tier.maintain()
    assert all(tier.get(id) is not None for id in ids)
    status, _, err = run("backup", tier.directory, tmp_path / "copy")
    assert (status, "copy exists" in err) == (1, True)


def test_templates(tier: WarmTier, tmp_path: Path, run: Run) -> None:
    """Built from a directory in use, into a bucket that is made, with keys from a file; listed."""
    store = object_store.gateway()
    objects = object_store.objects(store, "templates-command")
    keys = tmp_path / "keys.json"
    store.credentials.save(keys)
    where = ("--endpoint", store.endpoint, "--bucket", "templates-command", "--no-tls")
    options = (*where, "--credentials-file", keys)
    status, out, _ = run("templates", "build", tier.directory, *options, "--per-task", 3, "--json")
    assert status == 0
    (built,) = json.loads(out)
    assert (built["task"], built["couplets"], built["templates"]) == ("cut", COUNT, 3)
    status, out, _ = run("templates", "list", *options, "--json")
    (listed,) = json.loads(out)
    assert (listed["task"], listed["templates"]) == ("cut", 3)
    assert listed["provenance"] == PROVENANCE.hex()
    status, out, _ = run("templates", "list", *options)
    assert (status, "cut" in out) == (0, True)
    objects.delete(objects.names(prefix(PROVENANCE)))


def test_errors_are_one_line(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """No traceback: what is wrong, and status 1."""
    monkeypatch.delenv("CTRLCACHE_S3_ACCESS_KEY", raising=False)
    nothing = tmp_path / "nothing"
    calls: list[tuple[tuple[object, ...], str]] = [
        (("stats", nothing), "nothing is no directory"),
        (("verify", nothing), "nothing is no directory"),
        (("index", "rebuild", nothing), "nothing is no directory"),
        (("restore", nothing, tmp_path / "warm"), "is no backup"),
        (("templates", "list", "--endpoint", "h:1"), "set CTRLCACHE_S3_ACCESS_KEY"),
    ]
    for arguments, said in calls:
        status, _, err = run(*arguments)
        assert status == 1
        assert err.startswith("error: ")
        assert said in err
        assert err.count("\n") == 1
