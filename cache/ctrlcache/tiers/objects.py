"""A bucket of an S3 object store, with everything bounded: time, bytes and attempts.

What comes back is untrusted. A reply that is too long, too slow or no sense at all becomes an
`ObjectError` that says in one word what happened, for counting. Keys never appear in a text.
"""

from __future__ import annotations

import io
import logging
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import urllib3
from minio import Minio
from minio.deleteobjects import DeleteObject
from minio.error import S3Error

from ctrlcache.config import ColdConfig
from ctrlcache.errors import ConfigError, TierUnavailable

__all__ = ["ObjectError", "Objects"]

log = logging.getLogger(__name__)

_CHUNK_BYTES = 64 << 10
#: No answer other than an object needs more than this.
_REPLY_BYTES = 4 << 20
_DENIED = frozenset({"AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch"})


class ObjectError(TierUnavailable):
    """A request failed. result: `timeout`, `unreachable`, `denied`, `no_bucket`, `too_large`,
    `garbage` (no S3 reply) or `error` (any other refusal)."""

    def __init__(self, result: str, text: str) -> None:
        super().__init__(text)
        self.result = result


class _BoundedPool(urllib3.PoolManager):
    """Reads every reply itself, up to a number of bytes and seconds."""

    def __init__(self, timeout_s: float, **options: Any) -> None:
        super().__init__(
            timeout=urllib3.Timeout(connect=timeout_s, read=timeout_s),
            retries=False,
            maxsize=16,
            **options,
        )
        self.limits = threading.local()
        self._timeout_s = timeout_s

    def urlopen(  # type: ignore[override]
        self, method: str, url: str, redirect: bool = True, **options: Any
    ) -> urllib3.BaseHTTPResponse:
        # A reply may take as long again as its first byte may, and as its size makes likely.
        limit = getattr(self.limits, "reply_bytes", _REPLY_BYTES)
        deadline = time.monotonic() + 2 * self._timeout_s + limit / (16 << 20)
        options["preload_content"] = False
        response = super().urlopen(method, url, redirect=False, **options)
        try:
            data = bytearray()
            # Whatever has come: waiting for whole chunks, drop after drop would never be late.
            while chunk := response.read1(_CHUNK_BYTES, decode_content=False):
                data += chunk
                if len(data) > limit:
                    raise ObjectError("too_large", f"reply of more than {limit} bytes")
                if time.monotonic() > deadline:
                    raise ObjectError("timeout", "the reply does not end")
        except BaseException:
            response.close()
            raise
        response.release_conn()
        return urllib3.HTTPResponse(
            body=io.BytesIO(bytes(data)),
            headers=response.headers,
            status=response.status,
            reason=response.reason,
            preload_content=False,
            decode_content=False,
            request_method=method,
        )


class Objects:
    """One bucket. Methods raise ObjectError. Safe in several threads.

    endpoint: host:port. credentials: (access key, secret key). ca_file: certificates to trust
    instead of the system's. timeout_s: for connecting, and for each wait for more of a reply.
    """

    def __init__(
        self,
        endpoint: str,
        bucket: str,
        credentials: tuple[str, str],
        *,
        tls: bool = True,
        ca_file: Path | None = None,
        timeout_s: float = 1.0,
    ) -> None:
        self.endpoint = endpoint
        self.bucket = bucket
        trusted: dict[str, Any] = {}
        if tls:
            authorities = ca_file or os.environ.get("SSL_CERT_FILE")
            trusted = {"cert_reqs": "CERT_REQUIRED"}
            if authorities is not None:
                if not Path(authorities).is_file():
                    raise ConfigError(f"ca_file {authorities} does not exist")
                trusted["ca_certs"] = str(authorities)
        self._pool = _BoundedPool(timeout_s, **trusted)
        try:
            self._client = Minio(
                endpoint,
                access_key=credentials[0],
                secret_key=credentials[1],
                secure=tls,
                region="us-east-1",  # else the client asks for it before every first request
                http_client=self._pool,
            )
        except ValueError as error:
            raise ConfigError(f"object store endpoint {endpoint!r}: {error}") from None

    @classmethod
    def of(cls, config: ColdConfig) -> Objects:
        """As configured; ConfigError where credentials or certificates are not to be had."""
        if not config.endpoint:
            raise ConfigError("cold endpoint is empty: give host:port of an object store")
        return cls(
            config.endpoint,
            config.bucket,
            config.credentials(),
            tls=config.tls,
            ca_file=config.ca_file,
            timeout_s=config.timeout_s,
        )

    def __repr__(self) -> str:
        return f"Objects({self.endpoint!r}, {self.bucket!r})"

    def get(self, name: str, limit_bytes: int) -> bytes | None:
        """The object, of at most `limit_bytes`, or None where there is none."""
        self._pool.limits.reply_bytes = limit_bytes
        try:
            response = self._client.get_object(self.bucket, name)
            return bytes(response.read())
        except Exception as error:
            failure = self._failure(error, name)
            if failure is None:
                return None
            raise failure from error
        finally:
            self._pool.limits.reply_bytes = _REPLY_BYTES

    def put(self, name: str, data: bytes) -> None:
        """Store or replace an object, whole or not at all."""
        try:
            self._client.put_object(self.bucket, name, io.BytesIO(data), len(data))
        except Exception as error:
            raise self._failure(error, name) or ObjectError(
                "error", f"cannot store {name}"
            ) from error

    def delete(self, names: Iterable[str]) -> None:
        """Remove objects; those that are not there are no matter."""
        try:
            doomed = [DeleteObject(name) for name in names]
            refused = list(self._client.remove_objects(self.bucket, doomed)) if doomed else []
        except Exception as error:
            failure = self._failure(error, "objects")
            if failure is not None:
                raise failure from error
            return
        if refused:
            raise ObjectError("error", f"cannot delete {len(refused)} objects: {refused[0].code}")

    def names(self, prefix: str) -> list[str]:
        """Names of all objects that begin with `prefix`."""
        try:
            found = self._client.list_objects(self.bucket, prefix=prefix, recursive=True)
            return [str(item.object_name) for item in found]
        except Exception as error:
            failure = self._failure(error, prefix)
            if failure is None:
                return []
            raise failure from error

    def ensure_bucket(self) -> None:
        """Create the bucket if it does not exist."""
        try:
            if not self._client.bucket_exists(self.bucket):
                self._client.make_bucket(self.bucket)
        except Exception as error:
            raise self._failure(error, self.bucket) or ObjectError(
                "error", f"cannot create bucket {self.bucket}"
            ) from error

    def close(self) -> None:
        self._pool.clear()

    def _failure(self, error: Exception, name: str) -> ObjectError | None:
        """What an exception of the client means; None: there is no such object.

        The client parses whatever it gets, so rubbish can surface as nearly any exception.
        """
        if isinstance(error, ObjectError):
            return error
        where = f"{self.bucket}/{name} at {self.endpoint}"
        if isinstance(error, S3Error):
            if error.code == "NoSuchKey":
                return None
            if error.code == "NoSuchBucket":
                return ObjectError("no_bucket", f"bucket {self.bucket} does not exist")
            if error.code in _DENIED:
                return ObjectError("denied", f"{where}: {error.code}; check the credentials")
            return ObjectError("error", f"{where}: {error.code}")
        if isinstance(error, urllib3.exceptions.ProtocolError) and "BadStatusLine" in repr(error):
            return ObjectError("garbage", f"{where}: no HTTP reply")
        if isinstance(error, urllib3.exceptions.NewConnectionError | ConnectionError):
            return ObjectError("unreachable", f"{self.endpoint} cannot be reached")
        if isinstance(error, urllib3.exceptions.TimeoutError | TimeoutError):
            return ObjectError("timeout", f"{where}: no reply in time")
        if isinstance(error, urllib3.exceptions.SSLError):
            return ObjectError("unreachable", f"{self.endpoint}: TLS fails, check ca_file: {error}")
        if isinstance(error, urllib3.exceptions.HTTPError):
            return ObjectError("unreachable", f"{where}: {type(error).__name__}")
        return ObjectError("garbage", f"{where}: no S3 reply ({type(error).__name__})")
