"""Values of request parameters, checked one by one.

A value comes as whatever the client could send: a number may be a text of one. Each function
answers None (or its default) where the parameter is absent, and refuses what does not fit with an
`InvalidInput` that names the parameter, what was expected and what came.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ctrlcache.errors import InvalidInput

__all__ = ["choice", "flag", "integer", "number", "session_id", "text"]


def choice(parameters: Mapping[str, Any], name: str, known: tuple[str, ...]) -> str:
    value = parameters.get(name, known[0])
    if value not in known:
        raise InvalidInput(f"parameter {name!r} must be one of {', '.join(known)}, got {value!r}")
    return str(value)


def number(parameters: Mapping[str, Any], name: str, least: float) -> float | None:
    value = parameters.get(name)
    if value is None:
        return None
    try:
        # Older gRPC clients cannot send a float: a text of one is as good.
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number >= least):
        raise InvalidInput(
            f"parameter {name!r} must be a finite number of at least {least:g}, got {value!r}"
        )
    return number


def integer(parameters: Mapping[str, Any], name: str, least: int, most: int) -> int | None:
    value = parameters.get(name)
    if value is None:
        return None
    whole: int | None = None
    if isinstance(value, int) and not isinstance(value, bool):
        whole = value
    elif isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 20:
        whole = int(value)
    if whole is None or not least <= whole <= most:
        raise InvalidInput(
            f"parameter {name!r} must be a whole number from {least} to {most}, got {value!r}"
        )
    return whole


def session_id(parameters: Mapping[str, Any], name: str) -> int | str | None:
    value = parameters.get(name)
    if value is None:
        return None
    is_id = isinstance(value, int) or (isinstance(value, str) and _plain(value))
    if isinstance(value, bool) or not is_id or value in ("", 0) or len(str(value)) > 128:
        raise InvalidInput(
            f"parameter {name!r} must be the id of a session, a number or a text, got {value!r}"
        )
    return int(value) if isinstance(value, int) else str(value)


def text(parameters: Mapping[str, Any], name: str, most: int) -> str | None:
    value = parameters.get(name)
    if value is None:
        return None
    if not isinstance(value, str) or len(value) > most or not _plain(value):
        shown = repr(value) if len(repr(value)) <= 80 else f"{repr(value)[:80]}..."
        raise InvalidInput(
            f"parameter {name!r} must be a text of at most {most} characters, got {shown}"
        )
    return value


def _plain(text: str) -> bool:
    """Can be written as UTF-8, and holds no NUL."""
    return "\0" not in text and not any("\ud800" <= c <= "\udfff" for c in text)


def flag(parameters: Mapping[str, Any], name: str) -> bool:
    value = parameters.get(name, False)
    if value in (True, "true"):
        return True
    if value in (False, "false"):
        return False
    raise InvalidInput(f"parameter {name!r} must be true or false, got {value!r}")
