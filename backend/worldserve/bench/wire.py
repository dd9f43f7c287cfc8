"""One session of the benchmark on the wire, and what the client's clock says."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worldserve.bench.workload import HORIZON, Controls, Pixels

__all__ = ["OUTPUTS", "Reply", "Wire"]

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
    """latency_ms: from before the request is built to the arrays in hand.

    frames (H, h, w, 3); states (H, S); physics (H, P); stages_ms as TIMING_MS.
    """

    latency_ms: float
    frames: Pixels = field(repr=False)
    states: Controls = field(repr=False)
    physics: Controls = field(repr=False)
    tier: str
    exact: bool
    bound: float
    stages_ms: Controls = field(repr=False)


class Wire:
    """A Triton sequence. parameters: sent with each request."""

    def __init__(self, client: Any, **parameters: Any) -> None:
        self._client = client
        self._parameters = parameters
        self.id = f"bench-{os.getpid()}-{next(_numbers)}"
        self.started = False

    def ask(
        self,
        samples: Controls,
        frames: Pixels | None = None,
        end: bool = False,
        **parameters: Any,
    ) -> Reply:
        """samples (K, 4): transitions of `frames` (T, h, w, 3) first, then the plan."""
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
        samples: Controls,
        frames: Pixels | None = None,
        end: bool = False,
        **parameters: Any,
    ) -> float:
        """Show frames, move, or wait: nothing is predicted for it. Returns the latency, ms."""
        began = time.perf_counter()
        self._send(("TIMING_MS",), samples, frames, end, parameters)
        return (time.perf_counter() - began) * 1e3

    def _send(
        self,
        outputs: tuple[str, ...],
        samples: Controls,
        frames: Pixels | None,
        end: bool,
        parameters: dict[str, Any],
    ) -> Any:
        import tritonclient.grpc as grpcclient

        inputs = [
            _tensor("CONTROL", np.atleast_2d(samples).astype(np.float32)),
            _tensor("HORIZON", np.array([HORIZON], np.int32)),
        ]
        if frames is not None:
            inputs.append(_tensor("FRAMES", frames))
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


def _tensor(name: str, array: NDArray[Any]) -> Any:
    import tritonclient.grpc as grpcclient
    from tritonclient.utils import np_to_triton_dtype

    made = grpcclient.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    made.set_data_from_numpy(np.ascontiguousarray(array))
    return made
