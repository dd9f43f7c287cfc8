"""A further view of a session's scene: the same prediction, as another camera will see it.

A probe that names another view than its session's and brings that camera's last frame is answered
from the session's own prediction, cached or not: only the picture is carried over. The frame is not
observed; the session stays what and where it was.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ctrlcache.errors import InvalidInput
from worldserve.models.protocol import CarriesOver, Float, Pixels, RolloutOutput, WorldModel
from worldserve.request import Request
from worldserve.session import Session

__all__ = ["carried_over", "frame_from_elsewhere"]


def frame_from_elsewhere(request: Request, session: Session, model: WorldModel) -> Pixels | None:
    """The other camera's last frame (h, w, 3); None where the request looks from the session's own
    view, or the model cannot carry over. InvalidInput tells what a further view needs."""
    views = model.spec.views
    own = session.view or views[0]
    if request.view is None or request.view not in views or request.view in (own, session.view):
        return None
    if not isinstance(model, CarriesOver):
        return None
    if request.mode != "probe" or len(request.frames) != 1:
        raise InvalidInput(
            f"view {request.view!r} is not the session's own ({own!r}): a further view is probed, "
            f"with the last frame of that camera as the only one of FRAMES, got mode "
            f"{request.mode!r} and {len(request.frames)} frames"
        )
    frame: Pixels = request.frames[0]
    return frame


def carried_over(
    model: WorldModel,
    embed: Callable[[Pixels], Float],
    view: str,
    base: Pixels,
    frame: Pixels,
    tokens: Float,
    states: Float,
) -> Float:
    """Tokens (H, N, D) of what camera `view` will see, whose last frame is `frame`.

    embed: of the model, or what knows its tokens of frames that were asked for before. base: the
    last frame of the session's own view; tokens, states: predicted from there.
    """
    assert isinstance(model, CarriesOver)
    present, last = embed(np.stack([base, frame]))
    return model.carry_over(RolloutOutput(tokens, states, tokens[:0]), present, last, view)
