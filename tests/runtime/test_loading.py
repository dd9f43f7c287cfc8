"""A model whose process dies while it is loaded: found in seconds, and the reason told."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
from tiny_world import TINY

from worldserve import loading
from worldserve.loading import Loading, ServerLog
from worldserve.processes import Process
from worldserve.runtime import Runtime, RuntimeConfig, StartFailed

REPOSITORY = Path(__file__).resolve().parents[2] / "model_repository"


class Stage:
    """A clock and the processes of a model, set by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.live: list[int] = []

    def loading(self, instances: int) -> Loading:
        return Loading(lambda: [Process(pid) for pid in self.live], instances, lambda: self.now)


def test_the_first_process_may_end_and_the_others_take_a_moment():
    """Triton's own order of things, slow at each step, is no fault."""
    stage = Stage()
    watch = stage.loading(2)
    for live in ([], [1], [1], [], [2], [2, 3], [2, 3]):
        stage.live = live
        assert watch.check() is None
        stage.now += loading.PATIENCE_S / 3


@pytest.mark.parametrize(
    ("lived", "instances", "missing"),
    [([[1], []], 1, 1), ([[1], [2, 3], [3]], 2, 1), ([[1], [3]], 2, 1)],
)
def test_processes_that_stay_away_are_found(lived, instances, missing):
    """The first one, one of two, and one that was gone before anybody looked."""
    stage = Stage()
    watch = stage.loading(instances)
    for stage.live in lived:
        assert watch.check() is None
    stage.now += loading.PATIENCE_S + 1
    assert watch.check() == f"{missing} of {instances} stub processes ended while loading"


def test_the_log_names_the_reason_since_the_last_start(tmp_path):
    """The last line that names one; not one of an earlier start, nor what follows from it."""
    log = ServerLog(tmp_path / "server.log")
    assert log.with_reason("it ended") == "it ended"
    log.path.write_text("ValueError: of yesterday\n")
    log.mark()
    assert log.with_reason("it ended") == "it ended"
    with open(log.path, "a") as file:
        file.write(
            "INFO all is well\n"
            "E1 model.cc:1] \"failed to load 'm' version 1: Internal: ConfigError: odd\\n\\nAt:\"\n"
            "E1 model.cc:1] \"failed to load 'm' version 1: Internal: Stub is not healthy.\"\n"
        )
    assert log.with_reason("it ended") == "it ended: Internal: ConfigError: odd"


def repository_with(directory: Path, code: str) -> Path:
    """The shipped repository with some code before its world model."""
    made = directory / "repository"
    shutil.copytree(REPOSITORY, made, ignore=shutil.ignore_patterns("*.safetensors"))
    script = made / "world_model" / "1" / "model.py"
    script.write_text(f"import os\n\n{code}\n{script.read_text()}")
    return made


def config(repository: Path) -> RuntimeConfig:
    return RuntimeConfig.aside(
        repository,
        instances=1,
        parameters={"world_model_class": TINY, "hot_size_bytes": "64MiB", "history_frames": "64"},
    )


@pytest.mark.server
def test_a_start_ends_when_the_process_of_the_model_does(tmp_path):
    """Triton would wait for it for ever; the start fails, and says what the process said last."""
    code = "os.write(2, b'MemoryError: the weights are too large\\n')\nos.kill(os.getpid(), 9)"
    runtime = Runtime(config(repository_with(tmp_path, code)))
    with pytest.raises(StartFailed) as failed:
        runtime.start()
    shutil.rmtree(runtime.run_dir)
    assert str(failed.value).startswith(
        "world_model: 1 of 1 stub processes ended while loading: "
        "MemoryError: the weights are too large; the end of"
    )


@pytest.mark.server
def test_a_reload_ends_when_the_new_process_does(tmp_path):
    """Each process is killed as it comes: a reload fails in seconds."""
    runtime = Runtime(config(REPOSITORY))
    runtime.start()
    try:
        [old] = runtime.stubs("world_model")
        over = threading.Event()

        def killing() -> None:
            while not over.wait(0.01):
                for stub in runtime.stubs("world_model"):
                    if stub.pid != old.pid:
                        os.kill(stub.pid, signal.SIGKILL)

        killer = threading.Thread(target=killing)
        killer.start()
        began = time.monotonic()
        with pytest.raises(StartFailed, match="1 of 1 stub processes ended while loading"):
            runtime.reload_model("world_model", timeout_s=120)
        assert time.monotonic() - began < 60  # Triton itself would take the 120
        over.set()
        killer.join()
    finally:
        runtime.stop()
