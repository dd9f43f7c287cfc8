"""Who may do what at the server: TLS, access key, and what is closed to everyone but the launcher.

Triton can load code that a client sends, write files that a client names (trace, log) and map
shared memory that a client points to. So these interfaces are closed unless they are asked for:
they want a key that is made anew for each run and that only the run directory holds.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ctrlcache.errors import ConfigError

__all__ = [
    "ACCESS_HEADER",
    "ACCESS_KEY_VARIABLE",
    "ADMIN_HEADER",
    "Access",
    "AccessConfig",
    "Tls",
    "grpc_header",
    "read_secret",
]

#: HTTP headers; over gRPC each has Triton's prefix, see `grpc_header`.
ACCESS_HEADER, ADMIN_HEADER = "ctrlcache-key", "ctrlcache-admin"
ACCESS_KEY_VARIABLE = "CTRLCACHE_ACCESS_KEY"
ADMIN_KEY_FILE = "admin-key"

_USE = ("inference", "metadata", "model-config", "statistics")
_ADMIN = ("model-repository", "trace", "logging")
_SHARED_MEMORY = "shared-memory"
_KEY = re.compile(r"[A-Za-z0-9_.~+/-]{16,256}")


@dataclass(frozen=True)
class Tls:
    """PEM files of the gRPC endpoint. client_ca: given, clients need a certificate signed by it."""

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def __post_init__(self) -> None:
        for name in ("certificate", "key", "client_ca"):
            path = getattr(self, name)
            if path is None:
                continue
            try:
                text = path.read_text(errors="replace")
            except OSError as error:
                raise ConfigError(
                    f"tls {name} {str(path)!r} cannot be read ({error.strerror})"
                ) from None
            if "-----BEGIN" not in text:
                raise ConfigError(f"tls {name} {str(path)!r} is no PEM file")
        _only_for_its_owner(self.key, "tls key")


@dataclass(frozen=True)
class AccessConfig:
    """access_key_file: mode 0600, holds the key that clients must send; without it the variable
    CTRLCACHE_ACCESS_KEY counts, and without both there is none. shared_memory: clients may register
    shared memory. admin: clients may load and unload models and change tracing and logging."""

    access_key_file: Path | None = None
    tls: Tls | None = None
    shared_memory: bool = False
    admin: bool = False

    @property
    def has_key(self) -> bool:
        return self.access_key_file is not None or ACCESS_KEY_VARIABLE in os.environ


@dataclass(frozen=True)
class Access:
    """The keys of one run. `repr` shows none of them."""

    config: AccessConfig
    access_key: str | None = field(repr=False)
    admin_key: str = field(repr=False)

    @classmethod
    def open(cls, config: AccessConfig) -> Access:
        """Read the access key, make an admin key; ConfigError for a key that cannot be used."""
        key = None
        if config.access_key_file is not None:
            key = read_secret(config.access_key_file, "access key file")
        elif ACCESS_KEY_VARIABLE in os.environ:
            key = os.environ[ACCESS_KEY_VARIABLE]
        if key is not None and not _KEY.fullmatch(key):
            raise ConfigError(
                f"the access key has {len(key)} characters; expected 16 to 256 of letters, digits "
                "and _.~+/- (for example from: openssl rand -hex 32)"
            )
        return cls(config, key, secrets.token_hex(32))

    @property
    def options(self) -> list[str]:
        """Arguments of tritonserver that are no secret."""
        tls = self.config.tls
        if tls is None:
            return []
        made = [f"--grpc-server-cert={tls.certificate}", f"--grpc-server-key={tls.key}"]
        if tls.client_ca is None:
            return ["--grpc-use-ssl=true", *made]
        return ["--grpc-use-ssl-mutual=true", *made, f"--grpc-root-cert={tls.client_ca}"]

    @property
    def secret_options(self) -> list[str]:
        """Arguments of tritonserver that hold keys; health alone is open to everyone."""
        use, admin = list(_USE), list(_ADMIN)
        (use if self.config.shared_memory else admin).append(_SHARED_MEMORY)
        if self.config.admin:
            use += _ADMIN
            admin = [name for name in admin if name not in _ADMIN]
        rules = []
        if admin:
            rules.append(f"{','.join(admin)}:{ADMIN_HEADER}={self.admin_key}")
        if self.access_key is not None:
            rules.append(f"{','.join(use)}:{ACCESS_HEADER}={self.access_key}")
        kinds = ("--grpc-restricted-protocol", "--http-restricted-api")
        return [f"{kind}={rule}" for rule in rules for kind in kinds]

    @property
    def headers(self) -> dict[str, str]:
        """What the launcher sends over HTTP to be let in everywhere."""
        made = {ADMIN_HEADER: self.admin_key}
        if self.access_key is not None:
            made[ACCESS_HEADER] = self.access_key
        return made

    def save_admin_key(self, run_dir: Path) -> None:
        """For whoever operates the run by hand: the run directory's `admin-key`, mode 0600."""
        path = run_dir / ADMIN_KEY_FILE
        path.unlink(missing_ok=True)
        with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
            file.write(self.admin_key + "\n")

    def without_secrets(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The environment for the server: it gets its keys by other ways."""
        return {name: text for name, text in environment.items() if name != ACCESS_KEY_VARIABLE}


def grpc_header(name: str) -> str:
    """What Triton calls a key's header over gRPC."""
    return f"triton-grpc-protocol-{name}"


def read_secret(path: Path, what: str) -> str:
    """The first line of a file that only its owner can read; ConfigError, without its content."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text"
        raise ConfigError(f"{what} {str(path)!r} cannot be read ({reason})") from None
    _only_for_its_owner(path, what)
    return text.partition("\n")[0].strip()


def _only_for_its_owner(path: Path, what: str) -> None:
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise ConfigError(
            f"{what} {str(path)!r} is readable by others (mode {mode:04o}); expected 0600: chmod it"
        )
