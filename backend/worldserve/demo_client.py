"""The demo's side of the wire: one session, its requests, and what the client's clock says."""

from __future__ import annotations

import itertools
import os
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from worldserve.demo_script import HORIZON, Interaction

__all__ = ["STAGES", "Answer", "Session"]

#: What TIMING_MS holds, in order.
STAGES = ("align", "encode", "lookup", "dynamics", "decode", "total")
_OUTPUTS = (
    "PREDICTED_FRAMES",
    "STATE",
    "CACHE_TIER",
    "EXACT",
    "ERROR_BOUND",
    "TIMING_MS",
)
_MODEL = "world_model"
_sessions = itertools.count(1)


@dataclass(frozen=True, eq=False)
class Answer:
    """latency_ms: by the client's clock, from before the request is built to the arrays in hand.

    frames (H, h, w, 3), states (H, S), stages_ms in the order of STAGES.
    """

    latency_ms: float
    frames: NDArray[np.uint8]
    states: NDArray[np.float32]
    tier: str
    exact: bool
    bound: float
    stages_ms: NDArray[np.float32]

    def stage_ms(self, name: str) -> float:
        return float(self.stages_ms[STAGES.index(name)])


class Session:
    """One video on the server. parameters: sent with every request of this session."""

    def __init__(self, client: Any, prompt: str, **parameters: Any) -> None:
        self.id = f"demo-{os.getpid()}-{next(_sessions)}"
        self._client = client
        self._prompt = prompt
        self._parameters = parameters
        self._started = False

    def ask(self, interaction: Interaction, end: bool = False, **parameters: Any) -> Answer:
        """InferenceServerException where the server refuses."""
        import tritonclient.grpc as grpcclient

        began = time.perf_counter()
        inputs = [
            _tensor("CONTROL", interaction.samples),
            _tensor("HORIZON", np.array([HORIZON], np.int32)),
        ]
        if interaction.frames is not None:
            inputs.append(_tensor("FRAMES", interaction.frames))
        given = {**self._parameters, **interaction.parameters, **parameters}
        if not self._started:
            given["prompt"] = self._prompt
        reply = self._client.infer(
            _MODEL,
            inputs,
            outputs=[grpcclient.InferRequestedOutput(name) for name in _OUTPUTS],
            sequence_id=self.id,
            sequence_start=not self._started,
            sequence_end=end,
            parameters=given,
        )
        self._started = True
        got = {name: reply.as_numpy(name) for name in _OUTPUTS}
        return Answer(
            latency_ms=(time.perf_counter() - began) * 1e3,
            frames=got["PREDICTED_FRAMES"],
            states=got["STATE"],
            tier=got["CACHE_TIER"][0].decode(),
            exact=bool(got["EXACT"][0]),
            bound=float(got["ERROR_BOUND"][0]),
            stages_ms=got["TIMING_MS"],
        )


def _tensor(name: str, array: NDArray[Any]) -> Any:
    import tritonclient.grpc as grpcclient
    from tritonclient.utils import np_to_triton_dtype

    made = grpcclient.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    made.set_data_from_numpy(np.ascontiguousarray(array))
    return made
