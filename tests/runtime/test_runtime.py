"""The launcher against the real tritonserver."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.request
from pathlib import Path

import pytest
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException

from ctrlcache.errors import ConfigError
from worldserve import processes
from worldserve.runtime import ColdStore, Runtime, RuntimeConfig, StartFailed

pytestmark = pytest.mark.server

REPOSITORY = Path(__file__).parent / "repository"


def test_all_three_endpoints_answer(start_echo, connect):
    """A started run serves gRPC, HTTP and metrics, each on the port it names."""
    runtime = start_echo()
    assert connect(runtime).double() == 6
    with httpclient.InferenceServerClient(runtime.endpoints.http) as client:
        assert client.is_model_ready("echo")
    with urllib.request.urlopen(f"http://{runtime.endpoints.metrics}/metrics") as reply:
        assert b"nv_inference_request_success" in reply.read()


def test_ensemble_of_the_repository_is_loaded(start_echo, connect):
    """All models of the repository are loaded, and an ensemble without a version directory too."""
    runtime = start_echo()
    assert connect(runtime).double(4, model="pair") == 10


def test_stub_runs_in_this_interpreters_environment(start_echo, connect):
    """Stubs see the virtual environment of the launcher, its thread limits and the run's ids."""
    runtime = start_echo(instances=2)
    about = connect(runtime).about()
    assert about["prefix"] == sys.prefix
    assert int(about["numpy"].split(".")[0]) < 2
    environment = about["environment"]
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"
    assert int(environment["OMP_NUM_THREADS"]) == max(1, len(os.sched_getaffinity(0)) // 2 - 1)
    assert environment[processes.RUN_ID_VARIABLE] == runtime.run_id


def test_settings_reach_the_models_and_not_the_source(start_echo, connect):
    """`parameters` outrank config.pbtxt in the laid-out copy; the source stays as it was."""
    before = {path: path.read_bytes() for path in REPOSITORY.rglob("config.pbtxt")}
    runtime = start_echo(parameters={"color": "red", "echo.size": "5", "plain.size": "6"})
    parameters = connect(runtime).about()["parameters"]
    assert parameters["color"] == "red"
    assert parameters["size"] == "5"
    assert parameters["shm_dir"] == str(runtime.shm_dir)
    assert Path(parameters["warm_dir"]).parent == runtime.run_dir
    assert {path: path.read_bytes() for path in REPOSITORY.rglob("config.pbtxt")} == before


def test_instances_apply_to_sequence_models(start_echo):
    """`instances=2` starts two stubs of the sequence model and leaves the stateless one alone."""
    runtime = start_echo(instances=2)
    assert len(runtime.stubs("echo")) == 2
    assert len(runtime.stubs("plain")) == 1


def test_stop_lets_instances_finish_though_sequences_live(start_echo, connect, tmp_path):
    """Triton never finalizes a model with a live sequence; the stop notice reaches it anyway."""
    runtime = start_echo(parameters={"flush_file": str(tmp_path / "flushed")})
    connect(runtime).double(sequence_id=3, sequence_start=True)
    runtime.stop()
    assert (tmp_path / "flushed").read_text() == "flushed"


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGSTOP])
def test_stop_ends_dead_and_stopped_stubs(start_echo, connect, sent):
    """Whatever state a stub is in, after stop neither it nor its shared memory is left."""
    runtime = start_echo()
    connect(runtime).double()
    (stub,) = runtime.stubs("echo")
    os.kill(stub.pid, sent)
    began = time.monotonic()
    runtime.stop()
    assert time.monotonic() - began < 10
    assert not stub.alive
    # assert_no_trace of the fixture looks at processes, shared memory and the run directory


def test_nothing_is_left_when_the_launcher_is_killed(tmp_path):
    """After kill -9 of the launcher, its guard removes all that it left."""
    script = textwrap.dedent(
        f"""
        import sys, time
        from pathlib import Path
        from worldserve.runtime import Runtime, RuntimeConfig
        runtime = Runtime(RuntimeConfig(model_repository=Path({str(REPOSITORY)!r}), canary="echo",
                          http_port=0, grpc_port=0, metrics_port=0))
        runtime.start()
        print(runtime.run_id, runtime.run_dir, flush=True)
        time.sleep(600)
        """
    )
    launcher = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    run_id, run_dir = launcher.stdout.readline().split()
    assert processes.run_processes(run_id)
    assert processes.shm_entries(run_id)
    launcher.kill()
    launcher.wait()
    launcher.stdout.close()
    deadline = time.monotonic() + 10
    while (
        processes.run_processes(run_id) or processes.shm_entries(run_id) or Path(run_dir).exists()
    ):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_reload_brings_a_killed_stub_back(start_echo, connect):
    """The server goes on calling the model ready; only unload + load really brings it back."""
    runtime = start_echo()
    echo = connect(runtime)
    first = echo.about()["pid"]
    os.kill(first, signal.SIGKILL)
    with pytest.raises(InferenceServerException):
        echo.double()
    assert echo.client.is_model_ready("echo")
    runtime.reload_model("echo")
    assert echo.about()["pid"] != first
    assert echo.double(4, model="pair") == 10


def test_killed_instance_is_not_waited_for(start_echo):
    """What a killed stub left behind delays no stop, and is not reported as unfinished."""
    said: list[str] = []
    runtime = start_echo(log=said.append, flush_timeout_s=60.0)
    os.kill(runtime.stubs("echo")[0].pid, signal.SIGKILL)
    runtime.reload_model("echo")
    began = time.monotonic()
    runtime.stop()
    assert time.monotonic() - began < 10
    assert said == []


def test_restart_keeps_ports_and_the_object_store(start_echo, connect):
    """Clients find a restarted server, and the run's store, where they were."""
    runtime = start_echo(cold="embedded")
    assert runtime.store is not None
    runtime.store.client().make_bucket("kept")
    before = runtime.endpoints
    runtime.restart_server()
    assert runtime.endpoints == before
    assert connect(runtime).double() == 6
    assert runtime.store.client().bucket_exists("kept")


def test_model_that_fails_to_load_is_reported_with_its_log(tmp_path):
    """StartFailed carries the model's own words; the run directory with the logs is kept."""
    settings = {"echo.fail_to_load": "true"}
    runtime = Runtime(
        RuntimeConfig(REPOSITORY, canary="echo", cold="none", http_port=0, grpc_port=0,
                      metrics_port=0, parameters=settings, run_dir=tmp_path / "run")
    )  # fmt: skip
    with pytest.raises(StartFailed, match="told to fail while loading"):
        runtime.start()
    assert runtime.log_file.exists()
    assert processes.run_processes(runtime.run_id) == []
    assert processes.shm_entries(runtime.run_id) == []


def test_taken_port_is_named():
    """A port in use is refused before anything is started, with its number and what to do."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = RuntimeConfig(REPOSITORY, cold="none", http_port=port, grpc_port=0, metrics_port=0)
        runtime = Runtime(config)
        with pytest.raises(ConfigError, match=str(port)):
            runtime.start()
    assert processes.shm_entries(runtime.run_id) == []


def test_other_addresses_than_loopback_warn():
    """Listening where others can reach it is possible, but not silent."""
    with pytest.warns(UserWarning, match="without TLS"):
        RuntimeConfig(REPOSITORY, host="0.0.0.0")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"http_port": 70000}, "http_port is 70000"),
        ({"instances": 0}, "instances is 0"),
        ({"cold": "s3"}, "cold is 's3'"),
        ({"model_repository": Path("/nowhere")}, "'/nowhere'"),
    ],
)
def test_wrong_settings_are_named(settings, named):
    """Each refusal names the setting, its value and what would be right."""
    with pytest.raises(ConfigError, match=named):
        RuntimeConfig(**{"model_repository": REPOSITORY, **settings})


def test_setting_for_an_unknown_model_is_refused():
    """A misspelt model in `--set model.key=value` is an error, not a setting without effect."""
    runtime = Runtime(RuntimeConfig(REPOSITORY, cold="none", parameters={"ecco.size": "1"}))
    with pytest.raises(ConfigError, match="ecco"):
        runtime.start()


def test_external_store_reaches_the_models_without_its_secret(start_echo, connect, tmp_path):
    """Models get the endpoint and the path of the credentials; no command line shows a secret."""
    file = tmp_path / "credentials.json"
    file.write_text('{"access_key": "me", "secret_key": "do-not-show"}')
    file.chmod(0o600)
    runtime = start_echo(cold=ColdStore("minio.example:9000", credentials_file=file))
    parameters = connect(runtime).about()["parameters"]
    assert parameters["cold_endpoint"] == "minio.example:9000"
    assert parameters["cold_credentials_file"] == str(file)
    for process in processes.run_processes(runtime.run_id):
        assert "do-not-show" not in " ".join(process.command)


def test_credentials_readable_by_others_are_refused(tmp_path):
    """A secret that the whole machine can read stops the start, with the cure in the text."""
    file = tmp_path / "credentials.json"
    file.write_text('{"access_key": "me", "secret_key": "x"}')
    file.chmod(0o644)
    runtime = Runtime(
        RuntimeConfig(REPOSITORY, cold=ColdStore("minio.example:9000", credentials_file=file))
    )
    with pytest.raises(ConfigError, match="0600"):
        runtime.start()
