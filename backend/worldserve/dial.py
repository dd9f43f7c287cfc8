"""A gRPC client for a server that wants TLS or an access key."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctrlcache.errors import ConfigError
from worldserve.access import ACCESS_HEADER, grpc_header, read_secret

__all__ = ["ClientAccess", "dial"]


@dataclass(frozen=True)
class ClientAccess:
    """tls_ca: PEM of the CA that signed the server's certificate; without it there is no TLS.
    certificate, key: PEM, for mutual TLS. access_key_file: mode 0600."""

    tls_ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    access_key_file: Path | None = None

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("a client's certificate and its key need each other")
        if self.certificate is not None and self.tls_ca is None:
            raise ConfigError("a client's certificate is for TLS: name the server's CA, too")


def dial(url: str, access: ClientAccess) -> Any:
    """A `tritonclient.grpc.InferenceServerClient`, which sends the access key with every call.

    ConfigError for a key file that cannot be used.
    """
    import tritonclient.grpc as triton

    client = triton.InferenceServerClient(
        url,
        ssl=access.tls_ca is not None,
        root_certificates=_text(access.tls_ca),
        certificate_chain=_text(access.certificate),
        private_key=_text(access.key),
    )
    if access.access_key_file is not None:
        secret = read_secret(access.access_key_file, "access key file")

        class SendKey(triton.InferenceServerClientPlugin):  # type: ignore[misc]
            def __call__(self, request: Any) -> None:
                request.headers[grpc_header(ACCESS_HEADER)] = secret

        client.register_plugin(SendKey())
    return client


def _text(path: Path | None) -> str | None:
    return str(path) if path is not None else None
