"""Ask a model whether it answers: the one question that tells a live stub from a dead one.

Triton reports a model as ready while its stub is dead, hung or stopped. A canary is a request of
the smallest kind; a typed refusal (invalid argument, not found) is an answer too, since only a live
model can refuse.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from typing import Any

import numpy as np

from worldserve.models.protocol import Pixels

__all__ = ["Canary", "NoAnswer"]

#: Status codes that come from Triton or the transport, never from a model that is well.
_NOT_FROM_THE_MODEL = ("INTERNAL", "UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "UNKNOWN")
_count = itertools.count()


class NoAnswer(Exception):
    """The model did not answer; `late` where it may only be busy."""

    def __init__(self, message: str, late: bool) -> None:
        super().__init__(message)
        self.late = late


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
        self._inputs: list[Any] | None = None
        self._sequence = f"ctrlcache-canary-{os.getpid()}-{next(_count)}"
        self._started = False
        self._sequential = False

    def ask(self, deadline_s: float) -> None:
        """Return when the model answered (or refused); NoAnswer otherwise."""
        try:
            if self._inputs is None:
                self._inputs = self._smallest(deadline_s)
            self._infer(self._inputs, deadline_s)
        except self._grpc.InferenceServerException as error:
            raise self._no_answer(error) from None

    def ask_for_work(self, deadline_s: float) -> None:
        """Like `ask`, but let a world model really predict, from one black frame, where it can."""
        self.ask(deadline_s)
        metadata = self._connection().get_model_metadata(self.model, as_json=True)
        names = {tensor["name"] for tensor in metadata["inputs"]}
        if not {"CONTROL", "FRAMES", "HORIZON"} <= names:
            return
        frame: Pixels = np.zeros((1, 64, 64, 3), np.uint8)
        inputs = [*(self._inputs or []), self._input("FRAMES", frame)]
        inputs.append(self._input("HORIZON", np.ones(1, np.int32)))
        try:
            self._connection().infer(
                self.model,
                inputs,
                sequence_id=f"{self._sequence}-work",
                sequence_start=True,
                sequence_end=True,
                parameters={"cache": "off"},
                client_timeout=deadline_s,
            )
        except self._grpc.InferenceServerException as error:
            # A model of other frame sizes or modes may refuse; it has then answered.
            if not self._answered(error):
                raise self._no_answer(error) from None

    def end(self) -> None:
        """Give the batcher's slot back, where the model still answers, and disconnect."""
        if self._started and self._inputs is not None:
            with contextlib.suppress(self._grpc.InferenceServerException):
                self._connection().infer(
                    self.model,
                    self._inputs,
                    sequence_id=self._sequence,
                    sequence_end=True,
                    client_timeout=1.0,
                )
        self.close()

    def close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _infer(self, inputs: list[Any], deadline_s: float) -> None:
        sequence: dict[str, Any] = {}
        if self._sequential:
            sequence = {"sequence_id": self._sequence, "sequence_start": not self._started}
        try:
            self._connection().infer(self.model, inputs, client_timeout=deadline_s, **sequence)
        except self._grpc.InferenceServerException as error:
            if not self._answered(error):
                raise
            # The batcher forgets a sequence that was idle for too long; open it anew next time.
            self._started = "sequence_start" in sequence and "must specify" not in str(error)
            return
        self._started = self._sequential

    def _smallest(self, deadline_s: float) -> list[Any]:
        config = self._connection().get_model_config(
            self.model, as_json=True, client_timeout=deadline_s
        )["config"]
        self._sequential = "sequence_batching" in config
        inputs = []
        for tensor in config["input"]:
            if tensor.get("optional"):
                continue
            shape = [max(1, int(size)) for size in tensor["dims"]]
            if int(config.get("max_batch_size", 0)) > 0:
                shape = [1, *shape]
            if tensor["data_type"] == "TYPE_STRING":
                inputs.append(self._input(tensor["name"], np.full(shape, b"", np.object_)))
            else:
                dtype = _NUMPY[tensor["data_type"]]
                inputs.append(self._input(tensor["name"], np.zeros(shape, dtype)))
        return inputs

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

    def _no_answer(self, error: Exception) -> NoAnswer:
        text = str(error)
        return NoAnswer(f"{self.model}: {text}", late="deadline" in text.lower())


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
