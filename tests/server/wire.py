"""A client of the real server, the same over gRPC and HTTP."""

from __future__ import annotations

import time
import urllib.request
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

__all__ = ["NAMES", "InferenceServerException", "Wire", "code", "eventually", "metric"]

NAMES = (
    "PREDICTED_FRAMES",
    "STATE",
    "PHYSICS",
    "CONFIDENCE",
    "CACHE_TIER",
    "EXACT",
    "ERROR_BOUND",
    "SCORES",
    "TIMING_MS",
)
_CODES = {
    "StatusCode.INVALID_ARGUMENT": "invalid",
    "StatusCode.NOT_FOUND": "not found",
    "StatusCode.UNAVAILABLE": "unavailable",
    "StatusCode.CANCELLED": "cancelled",
    "StatusCode.DEADLINE_EXCEEDED": "deadline",
    "400": "invalid",
    "404": "not found",
    "503": "unavailable",
    "499": "cancelled",
}


def code(error: InferenceServerException) -> str:
    """What kind of refusal it was, whatever the protocol calls it."""
    return _CODES.get(str(error.status()), str(error.status()))


class Wire:
    """One client. `ask` returns outputs by name."""

    def __init__(
        self,
        endpoints: Any,
        protocol: str,
        model: str = "world_model",
        channel_args: Any = None,
    ) -> None:
        self.protocol, self.model = protocol, model
        if protocol == "grpc":
            self._module: Any = grpcclient
            self.client: Any = grpcclient.InferenceServerClient(
                endpoints.grpc, channel_args=channel_args
            )
        else:
            self._module = httpclient
            self.client = httpclient.InferenceServerClient(
                endpoints.http, concurrency=4, network_timeout=60.0
            )

    def request(self, control, id, outputs=None, start=False, end=False, frames=None, **extra):
        """The arguments of `infer`."""
        inputs = {}
        if control is not None:
            inputs["CONTROL"] = np.atleast_2d(np.asarray(control, np.float32))
        if frames is not None:
            inputs["FRAMES"] = frames
        for name in [name for name in extra if name.isupper()]:
            inputs[name] = np.asarray(extra.pop(name))
        wanted = NAMES if outputs is None else outputs
        return {
            "inputs": [self._tensor(name, array) for name, array in inputs.items()],
            "outputs": [self._module.InferRequestedOutput(name) for name in wanted],
            "sequence_id": id,
            "sequence_start": start,
            "sequence_end": end,
            "parameters": extra,
        }, wanted

    def ask(self, control, id, outputs=None, model=None, **options):
        timeout = options.pop("client_timeout", None)
        arguments, wanted = self.request(control, id, outputs, **options)
        if timeout is not None:
            arguments["client_timeout"] = timeout
        result = self.client.infer(model or self.model, **arguments)
        return {name: result.as_numpy(name) for name in wanted}

    def refused(self, control, id, **options):
        """(kind, text) of a refusal; fails where the request is answered."""
        try:
            self.ask(control, id, **options)
        except InferenceServerException as error:
            return code(error), error.message()
        raise AssertionError("the request was answered")

    def close(self) -> None:
        self.client.close()

    def _tensor(self, name, array):
        tensor = self._module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        return tensor


def metric(endpoints: Any, name: str, **labels: str) -> float | None:
    """The sum of a metric's series with these labels, None where there is none."""
    page = urllib.request.urlopen(f"http://{endpoints.metrics}/metrics", timeout=10)
    total = None
    for line in page.read().decode().splitlines():
        if line.startswith(f"{name}{{") and all(f'{k}="{v}"' in line for k, v in labels.items()):
            total = (total or 0.0) + float(line.rsplit(" ", 1)[1])
    return total


def eventually(condition, timeout_s: float = 10.0) -> None:
    """Fail unless the condition comes true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.05)
