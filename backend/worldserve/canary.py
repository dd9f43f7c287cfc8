"""Ask a model whether it answers: the one question that tells a live stub from a dead one.

Triton reports a model as ready while its stub is dead, hung or stopped. A canary is a request of
the smallest kind; a typed refusal (invalid argument, not found) is an answer too, since only a live
model can refuse.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = ["Canary", "NoAnswer"]

#: Status codes that come from Triton or the transport, never from a model that is well.
_NOT_FROM_THE_MODEL = ("INTERNAL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "UNKNOWN")
_count = itertools.count()


class NoAnswer(Exception):
    """The model did not answer; `late` where it may only be busy."""

    def __init__(self, message: str, late: bool) -> None:
        super().__init__(message)
        self.late = late


@dataclass(frozen=True)
class _Question:
    """opening: the inputs of a sequence's first request, following: of the others."""

    opening: list[Any]
    following: list[Any]
    outputs: list[Any] | None
    parameters: dict[str, str] | None
    sequential: bool


class Canary:
    """One model behind one gRPC endpoint.

    A canary of a sequence model keeps its sequence open: it thereby keeps a slot of the batcher, so
    that it never waits behind idle sequences. Not safe to use from several threads at once.
    """

    def __init__(self, grpc_endpoint: str, model: str) -> None:
        import tritonclient.grpc as grpcclient

        self._grpc = grpcclient
        self._endpoint = grpc_endpoint
        self.model = model
        self._client: Any = None
        self._question: _Question | None = None
        self._sequence = f"ctrlcache-canary-{os.getpid()}-{next(_count)}"
        self._started = False

    def ask(self, deadline_s: float) -> None:
        """Return when the model answered (or refused); NoAnswer otherwise."""
        try:
            if self._question is None:
                self._question = self._compose(deadline_s)
            self._infer(self._question, deadline_s)
        except self._grpc.InferenceServerException as error:
            text = str(error)
            raise NoAnswer(f"{self.model}: {text}", late="deadline" in text.lower()) from None

    def end(self) -> None:
        """Give the batcher's slot back, where the model still answers, and disconnect."""
        if self._started and self._question is not None:
            with contextlib.suppress(self._grpc.InferenceServerException):
                self._connection().infer(
                    self.model,
                    self._question.following,
                    outputs=self._question.outputs,
                    parameters=self._question.parameters,
                    sequence_id=self._sequence,
                    sequence_end=True,
                    client_timeout=1.0,
                )
        self.close()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _infer(self, question: _Question, deadline_s: float) -> None:
        sequence: dict[str, Any] = {}
        if question.sequential:
            sequence = {"sequence_id": self._sequence, "sequence_start": not self._started}
        try:
            self._connection().infer(
                self.model,
                question.following if self._started else question.opening,
                outputs=question.outputs,
                parameters=question.parameters,
                client_timeout=deadline_s,
                **sequence,
            )
        except self._grpc.InferenceServerException as error:
            if not self._answered(error):
                raise
            # Triton itself refuses a sequence that it has forgotten: open it anew next time.
            self._started = question.sequential and "must specify the START" not in str(error)
            return
        self._started = question.sequential

    def _compose(self, deadline_s: float) -> _Question:
        """A world model is asked to predict one frame from a black one, past its cache, so that
        nothing is left out; any other model gets zeros of the smallest shape it takes."""
        config = self._connection().get_model_config(
            self.model, as_json=True, client_timeout=deadline_s
        )["config"]
        tensors = {tensor["name"]: tensor for tensor in config["input"]}
        sequential = "sequence_batching" in config
        if {"CONTROL", "FRAMES", "HORIZON"} <= tensors.keys():
            following = [
                self._input("CONTROL", np.zeros((1, 4), np.float32)),
                self._input("HORIZON", np.ones(1, np.int32)),
            ]
            frame = self._input("FRAMES", np.zeros((1, 64, 64, 3), np.uint8))
            state = [self._grpc.InferRequestedOutput("STATE")]
            return _Question([*following, frame], following, state, {"cache": "off"}, sequential)
        smallest = []
        for name, tensor in tensors.items():
            if tensor.get("optional"):
                continue
            shape = [max(1, int(size)) for size in tensor["dims"]]
            if int(config.get("max_batch_size", 0)) > 0:
                shape = [1, *shape]
            text = tensor["data_type"] == "TYPE_STRING"
            zeros = (
                np.full(shape, b"", np.object_)
                if text
                else np.zeros(shape, _NUMPY[tensor["data_type"]])
            )
            smallest.append(self._input(name, zeros))
        return _Question(smallest, smallest, None, None, sequential)

    def _input(self, name: str, array: Any) -> Any:
        from tritonclient.utils import np_to_triton_dtype

        tensor = self._grpc.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
        tensor.set_data_from_numpy(array)
        return tensor

    def _connection(self) -> Any:
        if self._client is None:
            self._client = self._grpc.InferenceServerClient(self._endpoint)
        return self._client

    def _answered(self, error: Any) -> bool:
        if not any(code in str(error.status()) for code in _NOT_FROM_THE_MODEL):
            return True
        # An exception that the model's own Python code raised arrives as INTERNAL with its
        # traceback: a fault, but the stub lives, and loading it again would not mend it.
        return ".py(" in str(error)


_NUMPY = {
    "TYPE_BOOL": np.bool_,
    "TYPE_UINT8": np.uint8,
    "TYPE_UINT16": np.uint16,
    "TYPE_UINT32": np.uint32,
    "TYPE_UINT64": np.uint64,
    "TYPE_INT8": np.int8,
    "TYPE_INT16": np.int16,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_FP16": np.float16,
    "TYPE_FP32": np.float32,
    "TYPE_FP64": np.float64,
}
