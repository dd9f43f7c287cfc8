"""A language model that says which operations a prompt means: any OpenAI-compatible endpoint.

Off unless an address is configured. Its key comes from a file or from the environment, never from
the configuration. It has a time limit, and whatever goes wrong (no answer, another operation than
the known ones, another number of them) is a None: the caller goes on without it.
"""

from __future__ import annotations

import http.client
import json
import logging
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ctrlcache.errors import ConfigError

__all__ = ["LanguageModel", "LanguageModelConfig"]

_log = logging.getLogger(__name__)
_KEY = "CTRLCACHE_LLM_API_KEY"
_MOST_BYTES, _PART = 1 << 20, 1 << 16


@dataclass(frozen=True)
class LanguageModelConfig:
    """url: up to and including the version, for instance http://127.0.0.1:8000/v1. key_file: of
    mode 0600; without it CTRLCACHE_LLM_API_KEY, and without that no key is sent. timeout_s: for
    the whole answer."""

    url: str
    model: str = "default"
    key_file: Path | None = None
    timeout_s: float = 2.0

    def __post_init__(self) -> None:
        if not re.fullmatch(r"https?://[^\s/]+(/\S*)?", self.url):
            raise ConfigError(f"language model url must be http(s)://host/..., got {self.url!r}")
        if not 0 < self.timeout_s <= 60:
            raise ConfigError(f"language model timeout_s must be 0 to 60, got {self.timeout_s}")

    def key(self) -> str | None:
        """ConfigError where the file is missing or can be read by others."""
        if self.key_file is None:
            return os.environ.get(_KEY)
        try:
            mode = self.key_file.stat().st_mode & 0o777
            if mode & 0o077:
                raise ConfigError(
                    f"language model key_file {self.key_file} can be read by others "
                    f"(mode {mode:03o}); chmod 600 it"
                )
            return self.key_file.read_text().strip()
        except OSError as error:
            raise ConfigError(f"language model key_file: {error}") from None


class LanguageModel:
    """Callable as `Parser` wants it."""

    def __init__(self, config: LanguageModelConfig) -> None:
        self._config = config
        self._key = config.key()

    def __call__(self, phrases: Sequence[str], operations: Sequence[str]) -> list[str] | None:
        """The operation of each phrase; None where it does not say so in time."""
        try:
            named = self._ask(phrases, operations)
        except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
            # Never the request itself: it carries the key.
            _log.warning("the language model gave no answer: %s", type(error).__name__)
            return None
        if len(named) != len(phrases) or not set(named) <= set(operations):
            _log.warning("the language model named other operations than the known ones")
            return None
        return named

    def _ask(self, phrases: Sequence[str], operations: Sequence[str]) -> list[str]:
        task = (
            "For each numbered phrase, choose the operation it means. Known operations: "
            f"{', '.join(operations)}. Reply with a JSON array of operation names, one for each "
            "phrase, and nothing else."
        )
        listed = "\n".join(f"{number}. {phrase}" for number, phrase in enumerate(phrases, 1))
        body = {
            "model": self._config.model,
            "temperature": 0,
            "messages": [
                {"role": "system", "content": task},
                {"role": "user", "content": listed},
            ],
        }
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        request = urllib.request.Request(
            self._config.url.rstrip("/") + "/chat/completions", json.dumps(body).encode(), headers
        )
        deadline = time.monotonic() + self._config.timeout_s
        text = b""
        with urllib.request.urlopen(request, timeout=self._config.timeout_s) as reply:
            while part := reply.read1(_PART):
                text += part
                if time.monotonic() > deadline or len(text) > _MOST_BYTES:
                    raise TimeoutError("too slow, or too long")
        return _names(json.loads(text))


def _names(answer: Any) -> list[str]:
    """The names in a chat completion; ValueError, LookupError or TypeError where there are none."""
    found = re.search(r"\[.*\]", answer["choices"][0]["message"]["content"], re.DOTALL)
    named = json.loads(found[0]) if found else None
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise ValueError("no JSON array of names")
    return named
