"""What the server's own processes log: text for people, or JSON lines for machines.

Every line about a request carries its session and request ids. Only this project's loggers go below
warnings: what an HTTP library logs in detail may hold credentials.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import IO, Any

__all__ = ["FORMATS", "LEVELS", "configure", "fields"]

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
_OURS = ("ctrlcache", "worldcache", "worldserve")
_FIELDS = "fields"


def fields(**values: Any) -> dict[str, Any]:
    """For `extra=`: what a line is about, as `session`, `request` or times. Empty ones are left
    out."""
    return {_FIELDS: {name: value for name, value in values.items() if value not in (None, "")}}


def configure(
    format: str = "text", level: str = "info", instance: str = "", stream: IO[str] | None = None
) -> None:
    """Have all logging of this process go to `stream` (standard error) in one form.

    format: of FORMATS; level: of LEVELS, for this project's loggers. instance: of the model, or the
    program that speaks. Called again, it replaces what it had set up.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(_Json(instance) if format == "json" else _Text())
    root = logging.getLogger()
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for name in _OURS:
        logging.getLogger(name).setLevel(level.upper())


class _Text(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        told = " ".join(f"{name}={value}" for name, value in _told(record).items())
        return super().formatMessage(record) + (f" [{told}]" if told else "")


class _Json(logging.Formatter):
    """One object a line: time (UTC), level, logger, instance, message, then the fields."""

    def __init__(self, instance: str) -> None:
        super().__init__()
        self._instance = instance

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line: dict[str, Any] = {
            "time": f"{clock}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
        }
        if self._instance:
            line["instance"] = self._instance
        line["message"] = record.getMessage()
        # What names a field like one of these is not to hide it.
        line |= {name: value for name, value in _told(record).items() if name not in line}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def _told(record: logging.LogRecord) -> dict[str, Any]:
    told = getattr(record, _FIELDS, None)
    return told if isinstance(told, dict) else {}
