"""The model as Triton's Python backend sees it; the only importer of `triton_python_backend_utils`.

A `model.py` in the repository binds one of these classes to the name `TritonPythonModel`.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from ctrlcache.config import CacheConfig
from ctrlcache.errors import CtrlCacheError, InvalidInput, TierUnavailable
from ctrlcache.shared import SharedMemory
from worldserve import logs
from worldserve.cold import ColdStep
from worldserve.engine import Abandonment, Reply
from worldserve.gate import Overloaded
from worldserve.logs import fields
from worldserve.metrics import TritonSink, triton_metrics
from worldserve.options import ServeOptions
from worldserve.request import OUTPUTS, RawRequest, parse_cold
from worldserve.service import WorldService
from worldserve.session_store import SessionConflict, SessionNotFound, SessionsFull
from worldserve.shutdown import StopWatch
from worldserve.tracing import parent_of

__all__ = ["TritonColdTemplates", "TritonWorldModel"]

_START, _END = 1, 2
_SWITCH_S = 5e-4
_NOT_OURS = frozenset({"run_dir"})
_COLD_METRICS = ("ctrlcache_cold_requests_total", "ctrlcache_corrupt_total")
_CODES: tuple[tuple[type[Exception], str], ...] = (
    (InvalidInput, "INVALID_ARG"),
    (SessionNotFound, "NOT_FOUND"),
    (SessionsFull, "UNAVAILABLE"),
    (Overloaded, "UNAVAILABLE"),
    (SessionConflict, "UNAVAILABLE"),
    (TierUnavailable, "UNAVAILABLE"),
    (Abandonment, "CANCELLED"),
)
_log = logging.getLogger(__name__)


class TritonWorldModel:
    """`world_model`: every request is put to a WorldService, which answers from its own thread."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the model, open the cache; a ConfigError here is what `load` reports."""
        _configure_logs(args)
        # A thread in the background holds the interpreter for at most this long.
        sys.setswitchinterval(_SWITCH_S)
        self._sink = TritonSink(triton_metrics(pb_utils), args["model_instance_name"])
        self._service = WorldService(
            parameters=own_parameters(args),
            directory=version_directory(args),
            name=args["model_instance_name"],
            on_event=self._sink,
        )
        self._closing = threading.Lock()
        self._closed = False
        self._answered = 0
        self._watch = StopWatch(self._close, finished=lambda: self._answered)
        pb_utils.Logger.log_info(self._service.description)

    def execute(self, requests: list[Any]) -> None:
        """Hand over; replies are sent later, each by its own sender."""
        for request in requests:
            sender = request.get_response_sender()
            try:
                raw = _raw(request, self._service.options.trace_url != "")
            except Exception as error:
                _log.exception("a request cannot be read")
                _send(sender, error)
            else:
                self._service.put(raw, partial(self._answer, sender))

    def _answer(self, sender: Any, result: Reply | Exception) -> None:
        _send(sender, result)
        self._answered += 1  # from several threads: one that is lost does no harm

    def finalize(self) -> None:
        self._close()
        self._watch.close()

    def _close(self) -> None:
        """Write what must not be lost; once, whoever comes first: unload or the launcher."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._service.close()
                self._sink.close()


class TritonColdTemplates:
    """`cold_templates`: the controls that are typical of a task, as far as they are here.

    The task is the parameter `task`, or `prompt` where that is missing. It replies at once, unless
    the parameter `cold_wait_ms` says how long the caller will wait for the object store.
    """

    def initialize(self, args: Mapping[str, str]) -> None:
        _configure_logs(args)
        _, others = ServeOptions.from_mapping(own_parameters(args))
        config = CacheConfig.from_mapping(others)
        self._sink = TritonSink(
            triton_metrics(pb_utils), args["model_instance_name"], initial=_COLD_METRICS
        )
        hot = config.hot
        self._memory = SharedMemory(hot.directory, hot.size_bytes, hot.eviction)
        self._step = ColdStep(self._memory, config.cold, self._sink)

    def execute(self, requests: list[Any]) -> list[Any]:
        return [self._answer(request) for request in requests]

    def finalize(self) -> None:
        self._step.close()
        self._memory.close()
        self._sink.close()

    def _answer(self, request: Any) -> Any:
        try:
            task, wait_s = parse_cold(json.loads(request.parameters() or "{}"))
            controls = self._step.controls(task, wait_s=wait_s)
        except Exception as error:
            told = fields(request=request.request_id())
            if not isinstance(error, CtrlCacheError):
                _log.exception("the cold step failed", extra=told)
            return pb_utils.InferenceResponse(error=triton_error(error))
        return pb_utils.InferenceResponse(
            output_tensors=[
                pb_utils.Tensor("TEMPLATE_CONTROLS", controls),
                pb_utils.Tensor("TEMPLATES", np.array([len(controls)], np.int32)),
            ]
        )


def _configure_logs(args: Mapping[str, str]) -> None:
    options, _ = ServeOptions.from_mapping(own_parameters(args))
    logs.configure(options.log_format, options.log_level, args["model_instance_name"])


def own_parameters(args: Mapping[str, str]) -> dict[str, str]:
    """The `parameters` of the model's config.pbtxt, without those that are the launcher's own."""
    parameters = json.loads(args["model_config"])["parameters"]
    return {
        name: value["string_value"] for name, value in parameters.items() if name not in _NOT_OURS
    }


def version_directory(args: Mapping[str, str]) -> Path:
    return Path(args["model_repository"]) / args["model_version"]


def _raw(request: Any, tracing: bool) -> RawRequest:
    inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
    flags = request.flags()
    timeout_us = request.timeout()
    return RawRequest(
        inputs=inputs,
        parameters=json.loads(request.parameters() or "{}"),
        correlation_id=request.correlation_id(),
        start=bool(flags & _START),
        end=bool(flags & _END),
        # Who asks for nothing in particular gets everything.
        outputs=frozenset(request.requested_output_names()) or frozenset(OUTPUTS),
        timeout_s=timeout_us / 1e6 if timeout_us else None,
        cancelled=request.is_cancelled,
        request_id=request.request_id(),
        traced=parent_of(request.trace().get_context()) if tracing else "",
    )


def _send(sender: Any, result: Reply | Exception) -> None:
    if isinstance(result, Reply):
        tensors = [pb_utils.Tensor(name, array) for name, array in result.outputs.items()]
        response = pb_utils.InferenceResponse(output_tensors=tensors)
    else:
        response = pb_utils.InferenceResponse(error=triton_error(result))
    # Where the client has gone away there is nobody to tell.
    with suppress(Exception):
        sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)


def triton_error(error: Exception) -> Any:
    """The typed error for what went wrong; a fault of ours is INTERNAL."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return pb_utils.TritonError(str(error), getattr(pb_utils.TritonError, code))
    return pb_utils.TritonError(f"{type(error).__name__}: {error}", pb_utils.TritonError.INTERNAL)
