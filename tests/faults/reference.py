"""A script for the reference model: the same requests, undisturbed or with something breaking."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from crowd import CHANNEL
from stand import Stand
from tiny_world import clip
from wire import InferenceServerException, Wire

__all__ = ["Play", "play"]

STEPS = 10
_PATIENCE_S = 120.0


@dataclass
class Play:
    """digests: of each answer's states and frames. back_s: how long after the harm it went on."""

    digests: list[str] = field(default_factory=list)
    refused: int = 0
    back_s: float | None = None


def play(server: Stand, number: int, disturb: Callable[[], None] | None) -> Play:
    """Watch a clip, then probe and advance in turns, all exact. Undisturbed nothing is cached;
    disturbed, everything is, `disturb` happens halfway, and the session is resumed."""
    made = Play()
    draw = np.random.default_rng(number)
    id = f"reference-{number}-{disturb is not None}"
    common = {"max_error": "0", "cache": "on" if disturb else "off"}
    wire = Wire(server.endpoints, "grpc", channel_args=CHANNEL)
    harmed_s = 0.0

    def ask(control: Any, **options: Any) -> None:
        """Ask until there is an answer; whoever lost his place comes back for the session."""
        nonlocal harmed_s
        outputs = ["STATE", "PREDICTED_FRAMES", "EXACT"]
        again: dict[str, Any] = {}
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            try:
                got = wire.ask(control, id, outputs, client_timeout=20, **{**options, **again})
                break
            except InferenceServerException as error:
                made.refused += 1
                assert "no session" not in error.message()  # noqa: PT017
                assert time.monotonic() < deadline
                again = {"start": True, "resume": id}
                time.sleep(0.2)
        if harmed_s and made.back_s is None:
            made.back_s = time.monotonic() - harmed_s
        assert got["EXACT"][0]
        parts = (got["STATE"].tobytes(), got["PREDICTED_FRAMES"].tobytes())
        made.digests.append(hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest())

    frames = clip(6, seed=number, size=64)
    steps = draw.uniform(-0.5, 0.5, (STEPS, 4)).astype(np.float32)
    ask(np.vstack([steps[:5], steps[:1]]), frames=frames, start=True, **common)
    for at, step in enumerate(steps):
        if at == STEPS // 2 and disturb is not None:
            disturb()
            harmed_s = time.monotonic()
        # Only probes are repeated blindly: a step whose reply was lost may have been taken.
        ask(step, **common)
        ask(step, mode="advance", **common)
    wire.close()
    return made
