"""What the launcher asks of its own server: Triton's HTTP interface, on loopback, with its keys.

HTTP, because it needs no certificate where gRPC wants one of every client. Standard library only.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from typing import Any

__all__ = ["ApiRefused", "ApiSilent", "ServerApi"]


class ApiSilent(Exception):
    """No reply; `late` where none came in time, else there was no one to ask."""

    def __init__(self, message: str, late: bool) -> None:
        super().__init__(message)
        self.late = late


class ApiRefused(Exception):
    """A reply of another status than 200: `status`, and what it said."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text or f"HTTP status {status}")
        self.status = status


class ServerApi:
    """endpoint: host:port. One connection per question: nothing of an earlier one can be in the
    way. Safe in several threads."""

    def __init__(self, endpoint: str, headers: Mapping[str, str] | None = None) -> None:
        self._host, _, port = endpoint.rpartition(":")
        self._port = int(port)
        self._headers = dict(headers or {})

    def ready(self) -> bool:
        """Whether Triton says so; of the models it tells nothing."""
        try:
            self._ask("GET", "/v2/health/ready", None, 2.0)
        except (ApiSilent, ApiRefused):
            return False
        return True

    def config(self, model: str, timeout_s: float) -> dict[str, Any]:
        return self._ask("GET", f"/v2/models/{model}/config", None, timeout_s)

    def finished(self, model: str, timeout_s: float = 5.0) -> int | None:
        """Requests the model has finished, successful or not; None where that is not known."""
        try:
            found = self._ask("GET", f"/v2/models/{model}/stats", None, timeout_s)
            stats = found["model_stats"][0]["inference_stats"]
            return int(stats["success"]["count"]) + int(stats["fail"]["count"])
        except (ApiSilent, ApiRefused, LookupError):
            return None

    def infer(self, model: str, body: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """body: of the request; inputs with `binary_data_size` are zeros of that many bytes."""
        zeros = sum(
            int(one.get("parameters", {}).get("binary_data_size", 0)) for one in body["inputs"]
        )
        return self._ask("POST", f"/v2/models/{model}/infer", body, timeout_s, bytes(zeros))

    def load(self, model: str, timeout_s: float) -> None:
        self._ask("POST", f"/v2/repository/models/{model}/load", {}, timeout_s)

    def unload(self, model: str, timeout_s: float) -> None:
        self._ask("POST", f"/v2/repository/models/{model}/unload", {}, timeout_s)

    def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        timeout_s: float,
        tail: bytes = b"",
    ) -> dict[str, Any]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        try:
            content, headers = None, self._headers
            if body is not None:
                content = json.dumps(body).encode()
                if tail:
                    headers = {**headers, "Inference-Header-Content-Length": str(len(content))}
                content += tail
            connection.request(method, path, content, headers)
            reply = connection.getresponse()
            text = reply.read()
        except TimeoutError:
            raise ApiSilent(f"no answer within {timeout_s:g} s", late=True) from None
        except (OSError, http.client.HTTPException) as error:
            raise ApiSilent(str(error) or type(error).__name__, late=False) from None
        finally:
            connection.close()
        if reply.status != 200:
            raise ApiRefused(reply.status, _said(text))
        found: dict[str, Any] = json.loads(text) if text else {}
        return found


def _said(text: bytes) -> str:
    try:
        return str(json.loads(text)["error"])
    except (ValueError, KeyError, TypeError):
        return text[:500].decode(errors="replace")
