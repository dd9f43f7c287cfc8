"""One session of a world model on the wire, and what the client's clock says."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["OUTPUTS", "STAGES", "Reply", "SequenceClient", "tensor"]

#: What TIMING_MS holds, in order.
STAGES = ("align", "encode", "lookup", "dynamics", "decode", "total")
OUTPUTS = (
    "PREDICTED_FRAMES",
    "STATE",
    "PHYSICS",
    "CACHE_TIER",
    "EXACT",
    "ERROR_BOUND",
    "TIMING_MS",
)
_MODEL = "world_model"
_numbers = itertools.count(1)


@dataclass(frozen=True, eq=False)
class Reply:
    """latency_ms: by the client's clock, from before the request is built to the arrays in hand.

    frames (H, h, w, 3); states (H, S); physics (H, P); stages_ms in the order of STAGES.
    """

    latency_ms: float
    frames: NDArray[np.uint8] = field(repr=False)
    states: NDArray[np.float32] = field(repr=False)
    physics: NDArray[np.float32] = field(repr=False)
    tier: str
    exact: bool
    bound: float
    stages_ms: NDArray[np.float32] = field(repr=False)

    def stage_ms(self, name: str) -> float:
        return float(self.stages_ms[STAGES.index(name)])


class SequenceClient:
    """A Triton sequence over gRPC. horizon: frames to predict. parameters: sent with each request.

    InferenceServerException where the server refuses.
    """

    def __init__(self, client: Any, horizon: int, **parameters: Any) -> None:
        self._client = client
        self._horizon = np.array([horizon], np.int32)
        self._parameters = parameters
        self.id = f"client-{os.getpid()}-{next(_numbers)}"
        self.started = False

    def ask(
        self,
        samples: NDArray[np.float32],
        frames: NDArray[np.uint8] | None = None,
        end: bool = False,
        **parameters: Any,
    ) -> Reply:
        """samples (K, C): transitions of `frames` (T, h, w, 3) first, then the plan."""
        began = time.perf_counter()
        reply = self._send(OUTPUTS, samples, frames, end, parameters)
        got = {name: reply.as_numpy(name) for name in OUTPUTS}
        return Reply(
            latency_ms=(time.perf_counter() - began) * 1e3,
            frames=got["PREDICTED_FRAMES"],
            states=got["STATE"],
            physics=got["PHYSICS"],
            tier=got["CACHE_TIER"][0].decode(),
            exact=bool(got["EXACT"][0]),
            bound=float(got["ERROR_BOUND"][0]),
            stages_ms=got["TIMING_MS"],
        )

    def tell(
        self,
        samples: NDArray[np.float32],
        frames: NDArray[np.uint8] | None = None,
        end: bool = False,
        outputs: Sequence[str] = ("TIMING_MS",),
        **parameters: Any,
    ) -> float:
        """The latency, ms, of a request for `outputs`. By default nothing is predicted for it: to
        show frames, move, or wait."""
        began = time.perf_counter()
        reply = self._send(outputs, samples, frames, end, parameters)
        for name in outputs:
            reply.as_numpy(name)
        return (time.perf_counter() - began) * 1e3

    def _send(
        self,
        outputs: Sequence[str],
        samples: NDArray[np.float32],
        frames: NDArray[np.uint8] | None,
        end: bool,
        parameters: dict[str, Any],
    ) -> Any:
        import tritonclient.grpc as grpcclient

        inputs = [
            tensor("CONTROL", np.atleast_2d(samples).astype(np.float32)),
            tensor("HORIZON", self._horizon),
        ]
        if frames is not None:
            inputs.append(tensor("FRAMES", frames))
        reply = self._client.infer(
            _MODEL,
            inputs,
            outputs=[grpcclient.InferRequestedOutput(name) for name in outputs],
            sequence_id=self.id,
            sequence_start=not self.started,
            sequence_end=end,
            parameters={**self._parameters, **parameters},
        )
        self.started = True
        return reply


def tensor(name: str, array: NDArray[Any]) -> Any:
    """A gRPC input of the array's own type."""
    import tritonclient.grpc as grpcclient
    from tritonclient.utils import np_to_triton_dtype

    made = grpcclient.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    made.set_data_from_numpy(np.ascontiguousarray(array))
    return made
