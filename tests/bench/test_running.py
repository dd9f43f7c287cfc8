"""`ctrlcache benchmark --url`: against a server that is running, or not."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from worldserve.bench.running import Round


@pytest.mark.server
def test_benchmark_measures_a_running_server(server, tmp_path):
    """It prints ratios, and its file holds one latency per interaction and session."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ctrlcache.cli", "benchmark", f"--url={server.endpoints.grpc}"),
            *("--rounds=1", "--clips=1", "--pause-s=0", f"--out={tmp_path}"),
        ],
        env={**os.environ, "COLUMNS": "120", "TERM": "dumb"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "times faster, p50" in done.stdout
    (played,) = json.loads((tmp_path / "running.json").read_text())["rounds"]
    assert len(played["cached_ms"]) == len(played["plain_ms"]) == len(played["tiers"]) > 20
    # The script repeats questions: at least these must be hits, and its first one cannot be.
    assert played["tiers"][0] == "none"
    assert "hot" in played["tiers"]


def test_benchmark_names_a_server_that_is_not_there():
    """No traceback for a wrong address."""
    done = subprocess.run(
        [sys.executable, "-m", "ctrlcache.cli", "benchmark", "--url=127.0.0.1:9"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "127.0.0.1:9" in done.stderr
    assert "Traceback" not in done.stderr


def test_round_compares_like_with_like():
    """Ratios are of percentiles, hit rates of all answers."""
    played = Round([1.0, 1.0, 4.0], [10.0, 10.0, 10.0], ["hot", "warm", "none"], 1)
    assert played.ratio(50) == 10
    assert played.hit_rate == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cellar"], "unknown suite 'cellar'"),
        (["kitchen", "--rival=nobody"], "unknown rival 'nobody'"),
        (["kitchen", "--control-trace=/nowhere.csv"], "/nowhere.csv"),
        (["kitchen", "--set=nonsense"], "--set 'nonsense'; expected key=value"),
        (["kitchen", "--set=weights_dir=/nowhere"], "/nowhere"),
    ],
)
def test_what_cannot_be_played_is_named(arguments, message):
    done = subprocess.run(
        [sys.executable, "-m", "ctrlcache.cli", "benchmark", *arguments],
        env={**os.environ, "COLUMNS": "200", "TERM": "dumb"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.server
def test_a_server_that_does_not_start_says_why(tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ctrlcache.cli", "benchmark", "kitchen", "--steps=1000"),
            *("--clips=1", "--asks=2", f"--work={tmp_path}", f"--out={tmp_path}"),
        ],
        env={**os.environ, "COLUMNS": "200", "TERM": "dumb"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "generator_steps must be from 1 to 64, got 1000" in done.stderr
    assert "Traceback (most recent call last)" not in done.stderr.splitlines()[0]
