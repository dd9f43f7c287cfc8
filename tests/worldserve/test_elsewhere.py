"""A further view: the session's own prediction, seen by another camera."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_world import HELD, clip

from ctrlcache.errors import InvalidInput
from worldserve.images import resize_frames
from worldserve.models.protocol import RolloutInput
from worldserve.models.tiny import TinyWorldModel

OUTPUTS = ("PREDICTED_FRAMES", "STATE", "CACHE_TIER", "EXACT")
FRAMES, THERE = clip(6), clip(3, seed=9)


class SeeingModel(TinyWorldModel):
    """The tiny model, carrying changes over to its second camera."""

    def carry_over(self, predicted, present, last, view):
        assert view == "top"
        return (last + (predicted.tokens - present)).astype(np.float32)


@pytest.fixture
def client(serve):
    made = serve(model=SeeingModel())
    made.ask(HELD, frames=FRAMES, start=True, outputs=OUTPUTS)
    return made


def _expected(control, frame):
    """What the model itself says, without any server: its rollout, carried over and drawn."""
    model = SeeingModel()
    conditioning, _ = model.condition("", "")
    tokens = model.embed(FRAMES)
    memory = model.assemble([], 0)
    controls = np.repeat(HELD[None], len(FRAMES) - 1, 0)
    memory = model.absorb(memory, tokens[:-1], controls, conditioning).memory
    plan = np.repeat(np.asarray(control, np.float32)[None], 8, 0)
    [out] = model.rollout([RolloutInput(memory, tokens[-1], plan, conditioning)])
    carried = model.carry_over(out, tokens[-1], model.embed(frame[None])[0], "top")
    [frames] = model.generate([frame], [carried], [0])
    return frames, out.states


@pytest.mark.parametrize("cache", ["on", "off"])
def test_what_the_other_camera_will_see_is_carried_over(client, cache):
    """States are the session's, frames are drawn from the other camera's last one; bit for bit."""
    for _ in range(2):  # computed, then known
        for frame in THERE[:2]:
            got = client.ask(-HELD, frames=frame[None], view="top", outputs=OUTPUTS, cache=cache)
            frames, states = _expected(-HELD, _at_size(frame))
            assert np.array_equal(got["PREDICTED_FRAMES"], frames)
            assert np.array_equal(got["STATE"], states)
            assert got["EXACT"][0]


def _at_size(frame):
    return resize_frames(frame[None], TinyWorldModel().spec.frame_px)[0]


def test_a_known_prediction_needs_no_rollout(client):
    """What was asked before from one view is known from the other; only the picture is new."""
    client.ask(-HELD, outputs=OUTPUTS)
    assert client.service.drain()
    got = client.ask(-HELD, frames=THERE[:1], view="top", outputs=OUTPUTS)
    assert got["CACHE_TIER"][0] == b"hot"


def test_a_further_view_asked_for_again_is_known(serve):
    """Tokens of both cameras' frames and the picture are found: nothing is embedded or drawn."""
    calls = []

    class Counting(SeeingModel):
        def embed(self, frames):
            calls.append("embed")
            return super().embed(frames)

        def generate(self, *args, **kwargs):
            calls.append("generate")
            return super().generate(*args, **kwargs)

    client = serve(model=Counting(), background=False)
    client.ask(HELD, frames=FRAMES, start=True, outputs=OUTPUTS)
    ask = {"frames": THERE[:1], "view": "top", "outputs": OUTPUTS}
    first = client.ask(-HELD, **ask)
    assert client.service.drain()
    assert calls
    calls.clear()
    again = client.ask(-HELD, **ask)
    assert calls == []
    assert np.array_equal(again["PREDICTED_FRAMES"], first["PREDICTED_FRAMES"])


def test_a_further_view_leaves_the_session_as_it_was(client):
    """Its frame is not observed, and its pictures are nobody else's."""
    before = client.ask(HELD, outputs=OUTPUTS)
    client.ask(HELD, frames=THERE[:1], view="top", outputs=OUTPUTS)
    assert client.service.drain()
    after = client.ask(HELD, outputs=OUTPUTS)
    for name in ("PREDICTED_FRAMES", "STATE"):
        assert np.array_equal(before[name], after[name])


@pytest.mark.parametrize(
    ("frames", "options", "message"),
    [
        (None, {}, "with the last frame of that camera.*and 0 frames"),
        (THERE, {}, "and 3 frames"),
        (THERE[:1], {"mode": "advance"}, "got mode 'advance'"),
    ],
)
def test_what_a_further_view_needs_is_told(client, frames, options, message):
    """A probe, and one frame."""
    with pytest.raises(InvalidInput, match=message):
        client.ask(HELD, frames=frames, view="top", outputs=OUTPUTS, **options)


def test_a_view_nobody_has_is_refused_as_ever(client):
    """The view of a session is fixed, but for further ones that the model knows."""
    with pytest.raises(InvalidInput, match="fixed when a session begins"):
        client.ask(HELD, frames=THERE[:1], view="below", outputs=OUTPUTS)


def test_a_model_that_cannot_carry_over_keeps_to_one_view(serve):
    """Without the ability, the view stays fixed."""
    client = serve()
    client.ask(HELD, frames=FRAMES, start=True, outputs=OUTPUTS)
    with pytest.raises(InvalidInput, match="fixed when a session begins"):
        client.ask(HELD, frames=THERE[:1], view="top", outputs=OUTPUTS)
