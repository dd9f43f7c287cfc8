"""A warm-up computes ahead what a session will need, and changes nothing but the time it takes."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_world import HELD, TINY, Truth, clip, equal

from ctrlcache.errors import InvalidInput
from ctrlcache.events import Warmed
from worldserve.gate import Overloaded
from worldserve.models.tiny import TinyWorldModel


class Counting(TinyWorldModel):
    def __init__(self):
        super().__init__()
        self.embedded = self.rolled = 0

    def embed(self, frames):
        self.embedded += len(frames)
        return super().embed(frames)

    def rollout(self, inputs, checkpoint=None):
        self.rolled += len(inputs)
        return super().rollout(inputs, checkpoint)


@pytest.fixture
def served(serve, tmp_path, monkeypatch):
    """Services over one warm directory, one after the other; words are compared, not meanings."""
    from worldcache.prompts import WordHash

    monkeypatch.setattr("worldserve.warmth.sentences", WordHash)
    running = []

    def start(**parameters):
        while running:
            serve.stop(running.pop())
        model = Counting()
        parameters = {"warm_dir": tmp_path / "warm", "prefetch": False, **parameters}
        client = serve(model, world_model_class=TINY, **parameters)
        running.append(client)
        return client, model

    return start


def begin(client, id, prompt, seed=0, **extra):
    answer = client.ask(HELD, id, frames=clip(5, seed), start=True, prompt=prompt, **extra)
    assert client.service.drain()
    return answer


def warm(client, prompt, id="w", **extra):
    return client.ask(HELD, id, start=True, end=True, mode="warm", prompt=prompt, **extra)


def truth(prompt, seed=0):
    return Truth(clip(5, seed), np.repeat(HELD[None], 4, 0), prompt).predict(HELD)


def test_what_a_like_prompt_needed_is_there(served):
    """After a restart and a warm-up in other words, a session that begins computes nothing, under
    the old words and under the new ones, and its answers are the model's own."""
    client, _ = served()
    begin(client, "a", "push the cube")
    client, model = served()
    assert warm(client, "push cube")["CONFIDENCE"] >= 0.75
    before = model.rolled, model.embedded
    for id, prompt in (("b", "push the cube"), ("c", "push cube")):
        answer = client.ask(HELD, id, frames=clip(5), start=True, prompt=prompt)
        assert answer["CACHE_TIER"][0] != b"none"
        assert answer["EXACT"][0]
        assert equal(answer, truth(prompt))
    assert (model.rolled, model.embedded) == before


def test_an_unknown_prompt_takes_the_fallback(served):
    """partial_load loads what there is under its own words, skip loads nothing."""
    client, _ = served()
    begin(client, "a", "push the cube")
    for policy, loaded in (("skip", 0), ("partial_load", 1)):
        events = []
        client, _ = served(fallback_policy=policy)
        client.service._warmth._on_event = events.append
        assert warm(client, "zzz")["CONFIDENCE"] < 0.75
        assert events.count(Warmed(policy)) == loaded


def test_tenants_keep_their_recipes(served):
    """What one tenant did is not loaded for another."""
    client, _ = served()
    begin(client, "a", "push the cube", tenant="one")
    assert warm(client, "push the cube", tenant="two")["CONFIDENCE"] == 0
    assert warm(client, "push the cube", tenant="one")["CONFIDENCE"] > 0.99


def test_prompts_of_the_settings_are_warm_before_the_first_request(served):
    """warm_prompts does at the start what mode=warm does later."""
    client, _ = served()
    begin(client, "a", "push the cube")
    client, model = served(warm_prompts="push the cube | pull the lever")
    rolled = model.rolled
    answer = client.ask(HELD, "b", frames=clip(5), start=True, prompt="push the cube")
    assert model.rolled == rolled
    assert equal(answer, truth("push the cube"))


def test_a_damaged_recipe_is_passed_over(served, tmp_path):
    """It is deleted, and the others are loaded."""
    client, _ = served()
    begin(client, "a", "push the cube")
    begin(client, "b", "push the cube now", seed=1)
    client, _ = served()
    damaged, _ = sorted((tmp_path / "warm-recipes").iterdir())
    damaged.write_bytes(damaged.read_bytes()[:100])
    assert warm(client, "push the cube")["CONFIDENCE"] > 0.7
    assert not damaged.exists()


def test_a_warm_up_is_no_session(served):
    """It leaves no session behind, and a prompt that is no text is refused."""
    client, _ = served()
    begin(client, "a", "push the cube")
    before = client.service.sessions.count()
    warm(client, "push the cube")
    assert client.service.sessions.count() == before
    with pytest.raises(InvalidInput, match="prompt"):
        warm(client, 7)


def test_warm_ups_take_places_as_requests_do(served):
    """As many as may wait do; the next one is refused at once, and the others are answered."""
    client, _ = served(max_waiting=2)
    asked = {"start": True, "end": True, "mode": "warm", "prompt": "push the cube"}
    with client.service.background.floor():
        waiting = [client.send(HELD, f"w{n}", **asked) for n in range(2)]
        with pytest.raises(Overloaded, match="max_waiting"):
            client.ask(HELD, "w2", **asked)
    for outcome in waiting:
        assert outcome()["CONFIDENCE"] == 0
