"""What became of every request: counted as an event and told in the log, once it is answered."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from ctrlcache.errors import InvalidInput, TierUnavailable
from ctrlcache.events import Answered, Refused, Sink
from worldserve.engine import Abandonment, Reply
from worldserve.gate import Overloaded
from worldserve.logs import fields
from worldserve.request import RawRequest
from worldserve.session_store import SessionConflict, SessionNotFound, SessionsFull
from worldserve.tracing import Spans

__all__ = ["Accounts", "reason_of"]

_log = logging.getLogger(__name__)
_REASONS: tuple[tuple[type[Exception], str], ...] = (
    (InvalidInput, "invalid"),
    (SessionNotFound, "not_found"),
    (SessionsFull, "full"),
    (Overloaded, "overload"),
    (SessionConflict, "conflict"),
    (TierUnavailable, "unavailable"),
    (Abandonment, "cancelled"),
)
#: What a client did wrong, or did not want any more, is no trouble of the server's.
_QUIET = frozenset({"invalid", "not_found", "cancelled"})
_WARN_EVERY_S = 1.0

Deliver = Callable[[Reply | Exception], None]


def reason_of(error: Exception) -> str:
    """The label of `ctrlcache_refused_total` for an error."""
    return next((reason for kind, reason in _REASONS if isinstance(error, kind)), "failed")


class Accounts:
    """Wraps deliveries. Of equal warnings one a second is written: a flood of refusals must not
    become a flood of lines."""

    def __init__(
        self,
        on_event: Sink,
        monotonic: Callable[[], float] = time.monotonic,
        spans: Spans | None = None,
    ) -> None:
        self._on_event = on_event
        self._spans = spans
        self._now = monotonic
        self._lock = threading.Lock()
        self._warned_s: dict[str, float] = {}
        self._unsaid: dict[str, int] = {}

    def of(self, raw: RawRequest, deliver: Deliver) -> Deliver:
        """`deliver`, and then the accounts of it."""

        def settle(result: Reply | Exception) -> None:
            deliver(result)
            if isinstance(result, Reply):
                self._answered(raw, result.account)
            else:
                self._refused(raw, result)

        return settle

    def _answered(self, raw: RawRequest, account: Answered | None) -> None:
        if account is None:
            return
        self._on_event(account)
        if self._spans is not None and raw.traced:
            stages = [(stage, seconds) for stage, seconds in account.seconds if stage != "total"]
            known = {**_ids(raw), "mode": account.mode, "source": account.source}
            took_s = time.perf_counter() - raw.arrived_s
            self._spans.answered(raw.traced, took_s, stages, **known)
        if _log.isEnabledFor(logging.DEBUG):
            times = {f"{stage}_ms": round(seconds * 1e3, 3) for stage, seconds in account.seconds}
            _log.debug(
                "answered",
                extra=fields(**_ids(raw), mode=account.mode, source=account.source, **times),
            )

    def _refused(self, raw: RawRequest, error: Exception) -> None:
        reason = reason_of(error)
        self._on_event(Refused(reason))
        extra = fields(**_ids(raw), reason=reason)
        if reason in _QUIET:
            _log.debug("refused: %s", error, extra=extra)
        elif reason == "failed":
            _log.error("failed: %s", error, extra=extra, exc_info=error)
        elif (unsaid := self._due(reason)) is not None:
            more = f" (and {unsaid} more like it)" if unsaid else ""
            _log.warning("refused: %s%s", error, more, extra=extra)

    def _due(self, reason: str) -> int | None:
        """How many of its like were not written, or None where this one is not to be either."""
        with self._lock:
            now = self._now()
            if now - self._warned_s.get(reason, -_WARN_EVERY_S) < _WARN_EVERY_S:
                self._unsaid[reason] = self._unsaid.get(reason, 0) + 1
                return None
            self._warned_s[reason] = now
            return self._unsaid.pop(reason, 0)


def _ids(raw: RawRequest) -> dict[str, object]:
    return {
        "session": raw.correlation_id,
        "request": raw.request_id,
        "tenant": raw.parameters.get("tenant"),
    }
