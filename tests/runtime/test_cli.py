"""The programs `ctrlcache` and `worldserve`, run as a user runs them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from ctrlcache.cli import COMMANDS
from worldserve import cli as worldserve_cli
from worldserve import processes

REPOSITORY = Path(__file__).parent / "repository"
#: Free of colours and of line breaks, as in a log.
PLAIN = {**os.environ, "COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}


def program(name: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", f"{name}.cli", *arguments]


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        program(name, *arguments), env=PLAIN, capture_output=True, text=True, check=False
    )


class Up:
    """A `ctrlcache up` on free ports, over the tiny repository."""

    def __init__(self, directory: Path, *options: str) -> None:
        arguments = ["--http-port=0", "--grpc-port=0", "--metrics-port=0", "--health-port=0"]
        arguments += [f"--model-repository={REPOSITORY}", f"--run-dir={directory / 'run'}"]
        arguments += [f"--warm-dir={directory / 'warm'}", f"--objects-dir={directory / 'objects'}"]
        self.directory = directory
        self.process = subprocess.Popen(
            program("ctrlcache", "up", *arguments, *options),
            env=PLAIN,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def wait_for(self, pattern: str) -> str:
        assert self.process.stdout is not None
        seen = []
        for line in self.process.stdout:
            seen.append(line)
            found = re.search(pattern, line)
            if found:
                return found[found.re.groups]
        raise AssertionError(f"{pattern!r} never came:\n{''.join(seen)}")

    def end(self, sent: int) -> tuple[int, str, float]:
        """Exit status, what it printed last, seconds taken."""
        began = time.monotonic()
        self.process.send_signal(sent)
        rest, _ = self.process.communicate(timeout=15)
        return self.process.returncode, rest, time.monotonic() - began

    @property
    def run_id(self) -> str | None:
        """Of the run it started, found by the server's command line; None before that."""
        repository = f"--model-repository={self.directory / 'run' / 'repository'}"
        for pid in filter(str.isdigit, os.listdir("/proc")):
            if repository in processes.Process(int(pid)).command:
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                marker = f"{processes.RUN_ID_VARIABLE}=".encode()
                for entry in environment:
                    if entry.startswith(marker):
                        return entry.removeprefix(marker).decode()
        return None

    def echo_stub(self) -> processes.Process:
        return next(
            process
            for process in processes.run_processes(self.run_id or "")
            if "echo" in " ".join(process.command) and "stub" in process.command[0]
        )


def ask_health(url: str) -> tuple[int, dict[str, bool]]:
    """Status, and what the reply says of readiness."""
    try:
        with urllib.request.urlopen(url, timeout=20) as reply:
            status, text = reply.status, reply.read()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read()
    said = json.loads(text)
    return status, {name: said[name] for name in ("ready", "alive")}


@pytest.fixture
def up(tmp_path) -> Iterator:
    with ExitStack() as stack:

        def factory(*options: str) -> Up:
            started = Up(tmp_path, *options)
            stack.callback(started.process.wait)
            stack.callback(started.process.kill)
            return started

        yield factory


def ask_echo(endpoint: str) -> float:
    tensor = grpcclient.InferInput("X", [1], "FP32")
    tensor.set_data_from_numpy(np.ones(1, np.float32))
    with grpcclient.InferenceServerClient(endpoint) as client:
        result = client.infer("echo", [tensor], sequence_id=1, sequence_start=True)
        return float(result.as_numpy("Y")[0])


@pytest.mark.server
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_up_serves_until_a_signal_and_leaves_nothing(up, sent):
    """It prints where it listens, serves there, and after a signal all is gone within 10 s."""
    running = up("--instances=2", "--set=echo.color=green")
    endpoint = running.wait_for(r"gRPC\s+(\S+)")
    running.wait_for("Ctrl-C")
    assert ask_echo(endpoint) == 2
    run_id = running.run_id
    assert len(processes.run_processes(run_id)) == 5  # server, three stubs, gateway
    status, rest, took_s = running.end(sent)
    assert status == 0
    assert "nothing left" in rest
    assert took_s < 10
    assert processes.run_processes(run_id) == []
    assert processes.shm_entries(run_id) == []
    assert "Started GRPC" in (running.directory / "run/logs/tritonserver.log").read_text()
    assert (running.directory / "objects" / "metadata.db").exists()


@pytest.mark.server
def test_signal_while_starting_leaves_nothing(up):
    """Ctrl-C does not wait for a model that takes its time."""
    running = up("--set=echo.load_s=60", "--no-cold")
    deadline = time.monotonic() + 20
    while (run_id := running.run_id) is None or len(processes.run_processes(run_id)) < 3:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    status, _, took_s = running.end(signal.SIGINT)
    assert status == 130
    assert took_s < 10
    assert processes.run_processes(run_id) == []
    assert processes.shm_entries(run_id) == []


@pytest.mark.server
def test_up_brings_a_killed_stub_back(up):
    """`up` says what was lost and that it is back."""
    running = up("--no-cold")
    endpoint = running.wait_for(r"gRPC\s+(\S+)")
    health = running.wait_for(r"health\s+(http://\S+)/ready")
    running.wait_for("Ctrl-C")
    assert ask_health(f"{health}/ready") == (200, {"ready": True, "alive": True})
    os.kill(running.echo_stub().pid, signal.SIGSTOP)
    running.wait_for("echo lost")
    assert ask_health(f"{health}/ready") == (503, {"ready": False, "alive": True})
    assert ask_health(f"{health}/live")[0] == 200
    running.wait_for("echo is back")
    assert ask_health(f"{health}/ready")[0] == 200
    assert ask_echo(endpoint) == 2
    page = urllib.request.urlopen(f"{health}/metrics", timeout=20).read().decode()
    assert 'ctrlcache_supervisor_losses_total{model="echo"} 1.0' in page
    assert 'ctrlcache_supervisor_recoveries_total{how="reload",model="echo"} 1.0' in page
    assert 'ctrlcache_supervisor_up{model="echo"} 1.0' in page
    assert running.end(signal.SIGTERM)[0] == 0


@pytest.mark.server
def test_up_gives_up_loudly(up):
    """A model that no longer loads: `up` says so, ends with status 1 and leaves nothing behind."""
    running = up("--no-cold", "--attempts=2")
    health = running.wait_for(r"health\s+(http://\S+)/ready")
    running.wait_for("Ctrl-C")
    run_id = running.run_id
    config = running.directory / "run" / "repository" / "echo" / "config.pbtxt"
    broken = 'parameters { key: "fail_to_load" value { string_value: "true" } }'
    config.write_text(f"{config.read_text()}\n{broken}\n")
    os.kill(running.echo_stub().pid, signal.SIGKILL)
    running.wait_for("echo lost")
    assert ask_health(f"{health}/ready")[0] == 503
    rest, _ = running.process.communicate(timeout=60)
    assert running.process.returncode == 1
    assert "echo does not come back after 2 attempts" in rest
    assert processes.run_processes(run_id) == []
    assert processes.shm_entries(run_id) == []


@pytest.mark.server
def test_up_refuses_a_machine_that_cannot_serve(up):
    """Faults are found before anything is started."""
    running = up("--hot-bytes=9000GB")
    rest, _ = running.process.communicate(timeout=30)
    assert running.process.returncode == 1
    assert "FAIL" in rest
    assert "--hot-bytes" in rest


@pytest.mark.server
def test_up_reports_why_a_model_does_not_load(up):
    """The model's own words come to the terminal, not only to a log."""
    running = up("--set=echo.fail_to_load=true", "--no-cold")
    rest, _ = running.process.communicate(timeout=60)
    assert running.process.returncode == 1
    assert "told to fail while loading" in rest


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--set=color", "key=value"),
        ("--hot-bytes=lots", "512MB"),
        ("--model-repository=/nowhere", "/nowhere"),
    ],
)
def test_up_names_wrong_options(option, words):
    """Each refusal says what was expected."""
    done = run("ctrlcache", "up", option)
    assert done.returncode == 1
    assert words in done.stdout


def test_validate_env_prints_a_table_and_exits_by_it(tmp_path):
    """Status 0 where the machine can serve, 1 and the cure where not."""
    common = [f"--model-repository={REPOSITORY}", f"--warm-dir={tmp_path}"]
    common += [f"--objects-dir={tmp_path}", "--http-port=0", "--grpc-port=0", "--metrics-port=0"]
    done = run("ctrlcache", "validate-env", "--hot-bytes=1MB", *common)
    assert done.returncode == 0, done.stdout
    assert "tritonserver" in done.stdout
    done = run("ctrlcache", "validate-env", "--hot-bytes=9000GB", *common)
    assert done.returncode == 1
    assert "FAIL shared memory: give it more" in done.stdout


@pytest.mark.parametrize(
    ("name", "commands"),
    [("ctrlcache", COMMANDS), ("worldserve", worldserve_cli.COMMANDS)],
)
def test_help_names_all_commands_and_imports_none(name, commands):
    """`--help` is a table: no torch, no Triton client, no object store behind it."""
    code = (
        "import sys\n"
        f"from {name}.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as end: assert not end.code\n"
        "heavy = {'torch', 'numpy', 'tritonclient', 'minio', 'lmdb', 'worldserve.runtime'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=PLAIN, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for command in commands:
        assert command.name in done.stdout


@pytest.mark.parametrize(
    ("name", "command"),
    [
        *(("ctrlcache", command) for command in COMMANDS),
        *(("worldserve", command) for command in worldserve_cli.COMMANDS),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_every_command_is_there(name, command):
    """Each line of `--help` has something behind it, with help of its own."""
    done = run(name, command.name, "--help")
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_unknown_command_is_refused():
    """A typing error is not ignored."""
    done = run("ctrlcache", "starts")
    assert done.returncode == 2
    assert "starts" in done.stderr
