"""What is said of an answer: the outputs of a reply, and the account that metrics and logs are made
from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctrlcache.couplet import Couplet
from ctrlcache.metrics import Answered
from worldserve.models.protocol import Float, Pixels, WorldModel
from worldserve.opening import Turn
from worldserve.request import OUTPUTS

__all__ = ["STAGES", "Answer", "account_of", "is_complete", "outputs_of", "wants_answer"]

#: Outputs that need a prediction; a request for none of them only shows frames or moves.
_PREDICTIVE = frozenset(OUTPUTS) - {"TIMING_MS"}
STAGES = ("align", "encode", "lookup", "dynamics", "decode", "total")


@dataclass(eq=False)
class Answer:
    """What is known of one plan in one context. couplet: what was found or made.

    states (H, S): the couplet's own, or migrated to the plan where `exact` is False. frames: where
    they are known; else they can be drawn from `tokens` (H, N, D). elsewhere: the frames of a
    further view, where one was asked for.
    """

    couplet: Couplet
    states: Float
    frames: Pixels | None
    tokens: Float | None
    tier: str
    exact: bool
    bound: float
    elsewhere: Pixels | None = None

    def shown(self, turn: Turn) -> Pixels | None:
        """The frames that the turn asks for, where they are known."""
        return self.frames if turn.elsewhere is None else self.elsewhere


def wants_answer(turn: Turn) -> bool:
    """Whether a turn needs a prediction; else it only shows frames or moves."""
    return bool(turn.request.outputs & _PREDICTIVE)


def is_complete(turn: Turn, answer: Answer | None) -> bool:
    """Whether the reply needs no computing of the model."""
    if not wants_answer(turn):
        return True
    if answer is None:
        return False
    return "PREDICTED_FRAMES" not in turn.request.outputs or answer.shown(turn) is not None


def outputs_of(model: WorldModel, turn: Turn, answer: Answer | None) -> dict[str, NDArray[Any]]:
    """Those that the turn asks for, by name; TIMING_MS is not known yet."""
    wanted = turn.request.outputs
    made: dict[str, NDArray[Any]] = {}
    if answer is None:
        return made
    shown = answer.shown(turn)
    if "PREDICTED_FRAMES" in wanted and shown is not None:
        made["PREDICTED_FRAMES"] = shown
    if "STATE" in wanted:
        made["STATE"] = answer.states
    if "PHYSICS" in wanted:
        made["PHYSICS"] = model.physics(answer.states)
    if "CONFIDENCE" in wanted:
        made["CONFIDENCE"] = np.array([model.confidence(answer.states)], np.float32)
    if "CACHE_TIER" in wanted:
        made["CACHE_TIER"] = np.array([answer.tier.encode()], np.object_)
    if "EXACT" in wanted:
        redrawn = "PREDICTED_FRAMES" in wanted and turn.request.rendering.approximate
        made["EXACT"] = np.array([answer.exact and not redrawn])
    if "ERROR_BOUND" in wanted:
        made["ERROR_BOUND"] = np.array([answer.bound], np.float32)
    if "SCORES" in wanted:
        scores = [answer.couplet.stability, answer.couplet.transferability]
        made["SCORES"] = np.array(scores, np.float32)
    return made


def account_of(turn: Turn, answer: Answer | None) -> Answered:
    """Where a reply came from, and when."""
    if answer is None:
        source = "none"
    elif turn.request.cache != "on":
        source = "bypass"
    elif answer.tier == "none":
        source = "computed"
    else:
        source = "exact" if answer.exact else "near"
    seconds = tuple((stage, ms / 1e3) for stage, ms in turn.times_ms.items())
    return Answered(turn.request.mode, source, seconds)
