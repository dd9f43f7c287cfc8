"""Lay out what tritonserver needs: its own files, and a copy of the model repository to adjust.

A tritonserver and its Python backend ship inside the wheel `nvidia-pytriton`; NVIDIA's container
has them under /opt/tritonserver. The source repository stays untouched: the copy holds symbolic
links, but for the `config.pbtxt` files that carry this run's settings.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctrlcache.errors import ConfigError

__all__ = ["ServerFiles", "find_server", "lay_out_backends", "lay_out_models", "server_environment"]

CONTAINER = Path("/opt/tritonserver")


@dataclass(frozen=True)
class ServerFiles:
    """A tritonserver on this machine. stub: None where the backend directory has one already."""

    binary: Path
    backends: Path
    stub: Path | None
    libraries: tuple[Path, ...]
    version: str


def find_server(container: Path = CONTAINER) -> ServerFiles:
    """NVIDIA's container where it is, else the wheel; ConfigError says what to install."""
    if (container / "bin" / "tritonserver").exists():
        version = container / "TRITON_VERSION"
        return ServerFiles(
            binary=container / "bin" / "tritonserver",
            backends=container / "backends",
            stub=None,
            libraries=(container / "lib",),
            version=version.read_text().strip() if version.exists() else "container",
        )
    # Found, not imported: its __init__ pulls in far more than a path.
    spec = importlib.util.find_spec("pytriton")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "no tritonserver: neither /opt/tritonserver nor the wheel nvidia-pytriton is here; "
            "install it with `pip install 'nvidia-pytriton==0.7.0'`"
        )
    package = Path(spec.origin).parent
    root = package / "tritonserver"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "python_backend_stubs" / python / "triton_python_backend_stub"
    if not stub.exists():
        have = sorted(path.name for path in (root / "python_backend_stubs").glob("*"))
        raise ConfigError(
            f"the wheel nvidia-pytriton has no stub for Python {python}, only for "
            f"{', '.join(have)}; use one of these interpreters (this project is tested with 3.11)"
        )
    return ServerFiles(
        binary=root / "bin" / "tritonserver",
        backends=root / "backends",
        stub=stub,
        libraries=(package.parent / "nvidia_pytriton.libs",),
        version=f"nvidia-pytriton {importlib.metadata.version('nvidia-pytriton')}",
    )


def lay_out_backends(files: ServerFiles, target: Path) -> Path:
    """A backend directory whose Python backend has the stub of the running interpreter."""
    if files.stub is None:
        return files.backends
    target.mkdir(parents=True)
    for backend in files.backends.iterdir():
        shutil.copytree(
            backend, target / backend.name, ignore=shutil.ignore_patterns("__pycache__")
        )
    copy = target / "python" / files.stub.name
    shutil.copy2(files.stub, copy)
    copy.chmod(0o755)
    return target


def lay_out_models(
    source: Path,
    target: Path,
    parameters: Mapping[str, str],
    instances: int | None = None,
) -> dict[str, int]:
    """Copy a model repository as links; returns {model name: its instances, 0 for an ensemble}.

    parameters: `key` for every model of the Python backend or `model.key` for one; each becomes a
    parameter in the model's configuration, over what its config.pbtxt says. instances: how many of
    the models with sequence batching; others keep their own number.
    """
    directories = sorted(path.parent for path in source.glob("*/config.pbtxt"))
    if not directories:
        raise ConfigError(
            f"model repository {str(source)!r} holds no model: expected <model>/config.pbtxt"
        )
    names = {path.name for path in directories}
    for key in parameters:
        if "." in key and key.split(".")[0] not in names:
            raise ConfigError(
                f"setting {key!r} names no model of {str(source)!r}; there are {sorted(names)}"
            )
    counts: dict[str, int] = {}
    for directory in directories:
        copy = target / directory.name
        copy.mkdir(parents=True)
        config = _parse(directory / "config.pbtxt")
        ensemble = config.platform == "ensemble" or config.HasField("ensemble_scheduling")
        if not ensemble:
            _adjust(config, directory.name, parameters, instances)
        (copy / "config.pbtxt").write_text(_format(config))
        for path in directory.iterdir():
            if path.name != "config.pbtxt":
                (copy / path.name).symlink_to(path.resolve())
        # An ensemble has no files, and git keeps no empty directory; Triton insists on a version.
        if not any(path.name.isdigit() for path in copy.iterdir()):
            (copy / "1").mkdir()
        counts[directory.name] = 0 if ensemble else _instances(config)
    return counts


def server_environment(files: ServerFiles, threads: int) -> dict[str, str]:
    """The environment of the server and, inherited, of its stubs.

    The stub embeds an interpreter: it finds libpython by LD_LIBRARY_PATH and the virtual
    environment by the `python3` that comes first on PATH.
    """
    environment = dict(os.environ)
    libraries = [*files.libraries, Path(str(sysconfig.get_config_var("LIBDIR")))]
    inherited = environment.get("LD_LIBRARY_PATH", "")
    environment["LD_LIBRARY_PATH"] = ":".join([*map(str, libraries), inherited]).rstrip(":")
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment.get('PATH', '')}"
    environment.pop("PYTHONHOME", None)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environment[name] = str(threads)
    # Idle threads that spin steal the core from the other instance and from background work.
    environment["OMP_WAIT_POLICY"] = "PASSIVE"
    # Activations of up to a few MB come and go with every request: they stay on the heap, as pages
    # that are mapped anew and filled with zeros cost a tenth of an answer. What is larger goes back
    # at once, and threads share arenas: else a process grows to twice of what it holds.
    environment.setdefault("MALLOC_MMAP_THRESHOLD_", str(4 << 20))
    environment.setdefault("MALLOC_TRIM_THRESHOLD_", str(32 << 20))
    environment.setdefault("MALLOC_ARENA_MAX", "2")
    return environment


def _adjust(config: Any, model: str, parameters: Mapping[str, str], instances: int | None) -> None:
    general = {key: value for key, value in parameters.items() if "." not in key}
    own = {
        key.split(".", 1)[1]: value
        for key, value in parameters.items()
        if key.startswith(f"{model}.")
    }
    for key, value in {**general, **own}.items():
        config.parameters[key].string_value = value
    if instances is not None and config.HasField("sequence_batching"):
        kind = config.instance_group[0].kind if config.instance_group else 0
        del config.instance_group[:]
        group = config.instance_group.add()
        group.count = instances
        group.kind = kind or type(group).KIND_CPU


def _instances(config: Any) -> int:
    """What Triton will start on one device; without a group it starts one."""
    return max(1, sum(int(group.count) for group in config.instance_group))


def _parse(path: Path) -> Any:
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    try:
        return text_format.Parse(path.read_text(), model_config_pb2.ModelConfig())
    except text_format.ParseError as error:
        raise ConfigError(f"{path}: {error}") from error


def _format(config: Any) -> str:
    from google.protobuf import text_format

    return str(text_format.MessageToString(config))
