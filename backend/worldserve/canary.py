"""Ask a model whether it answers: the one question that tells a live stub from a dead one.

Triton reports a model as ready while its stub is dead, hung or stopped. A canary is a request of
the smallest kind; a typed refusal (invalid argument, not found) is an answer too, since only a live
model can refuse.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Mapping
from typing import Any

from worldserve.serverapi import ApiRefused, ApiSilent, ServerApi

__all__ = ["Canary", "NoAnswer"]

#: HTTP statuses that a model that is well gives: refusals of its own.
_REFUSALS = (400, 404, 409, 422)
_WORLD_MODEL = frozenset({"CONTROL", "FRAMES", "HORIZON"})
#: Of one element; an empty text is its length alone.
_BYTES = {
    **dict.fromkeys(("BOOL", "INT8", "UINT8"), 1),
    **dict.fromkeys(("INT16", "UINT16", "FP16", "BF16"), 2),
    **dict.fromkeys(("INT32", "UINT32", "FP32", "STRING"), 4),
    **dict.fromkeys(("INT64", "UINT64", "FP64"), 8),
}
_count = itertools.count()


class NoAnswer(Exception):
    """The model did not answer; `late` where it may only be busy."""

    def __init__(self, message: str, late: bool) -> None:
        super().__init__(message)
        self.late = late


class Canary:
    """One model behind one HTTP endpoint (host:port).

    A canary of a sequence model keeps its sequence open: it thereby keeps a slot of the batcher, so
    that it never waits behind idle sequences, and always reaches the same instance. It takes no
    session's place. Not safe to use from several threads at once.

    pid: of the process that answered last, where it tells.
    """

    def __init__(
        self, http_endpoint: str, model: str, headers: Mapping[str, str] | None = None
    ) -> None:
        self.model = model
        self.pid: int | None = None
        self._api = ServerApi(http_endpoint, headers)
        self._sequence = f"ctrlcache-canary-{os.getpid()}-{next(_count)}"
        self._question: dict[str, Any] | None = None
        self._sequential = False
        self._started = False

    def ask(self, deadline_s: float) -> None:
        """Return when the model answered (or refused); NoAnswer otherwise."""
        try:
            if self._question is None:
                self._compose(self._api.config(self.model, deadline_s))
            self._infer(deadline_s)
        except (ApiSilent, ApiRefused) as error:
            late = isinstance(error, ApiSilent) and error.late
            raise NoAnswer(f"{self.model}: {error}", late) from None

    def end(self) -> None:
        """Give the batcher's slot back, where the model still answers."""
        if self._started:
            self._started = False
            with contextlib.suppress(ApiSilent, ApiRefused):
                self._api.infer(self.model, self._body(1.0, sequence_end=True), 1.0)

    def _infer(self, deadline_s: float) -> None:
        body = self._body(deadline_s, sequence_start=not self._started)
        try:
            reply = self._api.infer(self.model, body, deadline_s)
        except ApiRefused as error:
            if not _answered(error):
                raise
            # Triton itself refuses a sequence that it has forgotten: open it anew next time.
            self._started = self._sequential and "must specify the START" not in str(error)
            return
        self._started = self._sequential
        self.pid = _pid(reply)

    def _body(self, deadline_s: float, **flags: bool) -> dict[str, Any]:
        assert self._question is not None
        parameters = dict(self._question.get("parameters", {}))
        if self._sequential:
            # Nobody reads an answer that comes later.
            parameters |= {"sequence_id": self._sequence, "timeout": int(deadline_s * 1e6), **flags}
        return {**self._question, "parameters": parameters}

    def _compose(self, config: Mapping[str, Any]) -> None:
        """A world model is asked to predict one frame, past its cache, so that nothing is left out;
        any other model gets zeros of the smallest shape it takes."""
        tensors = {tensor["name"]: tensor for tensor in config["input"]}
        self._sequential = "sequence_batching" in config
        batched = int(config.get("max_batch_size", 0)) > 0
        inputs = [
            _smallest(name, tensor, batched)
            for name, tensor in tensors.items()
            if not tensor.get("optional")
        ]
        self._question = {"inputs": inputs}
        if tensors.keys() >= _WORLD_MODEL:
            self._question |= {
                "outputs": [{"name": "STATE"}, {"name": "CACHE_TIER"}],
                "parameters": {"canary": True},
            }


def _smallest(name: str, tensor: Mapping[str, Any], batched: bool) -> dict[str, Any]:
    """Zeros, as Triton's binary extension has them: they look the same in every type."""
    shape = [max(1, int(size)) for size in tensor["dims"]]
    kind = str(tensor["data_type"]).removeprefix("TYPE_")
    return {
        "name": name,
        "shape": [1, *shape] if batched else shape,
        "datatype": "BYTES" if kind == "STRING" else kind,
        "parameters": {"binary_data_size": math.prod(shape) * _BYTES[kind]},
    }


def _answered(error: ApiRefused) -> bool:
    # An exception that the model's own Python code raised arrives as INTERNAL with its traceback: a
    # fault, but the stub lives, and loading it again would not mend it.
    if "unknown model" in str(error):
        return False
    return error.status in _REFUSALS or ".py(" in str(error)


def _pid(reply: Mapping[str, Any]) -> int | None:
    for output in reply.get("outputs", ()):
        data = output.get("data") or [None]
        if output.get("name") == "CACHE_TIER" and str(data[0]).startswith("pid:"):
            return int(str(data[0])[4:])
    return None
