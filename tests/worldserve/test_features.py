"""Features are found by content, exactly, by the same tenant, and not where the cache is off."""

from __future__ import annotations

import numpy as np
from tiny_world import HELD, TINY, Truth, clip, equal

from worldserve.models.tiny import TinyWorldModel


class Counting(TinyWorldModel):
    """Notes how many frames it embeds and draws."""

    def __init__(self):
        super().__init__()
        self.embedded = self.drawn = 0

    def embed(self, frames):
        self.embedded += len(frames)
        return super().embed(frames)

    def generate(self, last_frames, tokens, seeds, checkpoint=None):
        self.drawn += len(tokens)
        return super().generate(last_frames, tokens, seeds, checkpoint)


def served(serve, **parameters):
    model = Counting()
    client = serve(model, background=False, world_model_class=TINY, **parameters)
    model.embedded = model.drawn = 0
    return client, model


def begin(client, id, **extra):
    answer = client.ask(HELD, id, frames=clip(4), start=True, **extra)
    assert client.service.drain()
    return answer


def test_another_prompt_finds_the_tokens_of_the_same_video(serve):
    """The second session computes no tokens, and its answer is the model's own."""
    client, model = served(serve)
    begin(client, "one", prompt="push")
    assert model.embedded == 4
    answer = begin(client, "two", prompt="pull")
    assert model.embedded == 4
    assert equal(answer, Truth(clip(4), np.repeat(HELD[None], 3, 0), "pull").predict(HELD))


def test_tenants_share_nothing(serve):
    """Another tenant's session with the same video computes everything."""
    client, model = served(serve)
    begin(client, "one", tenant="a")
    begin(client, "two", tenant="b")
    assert model.embedded == 8


def test_with_the_cache_off_nothing_is_used(serve):
    """cache=off embeds and draws, whatever is known."""
    client, model = served(serve)
    begin(client, "one", prompt="push")
    begin(client, "two", prompt="pull", cache="off")
    assert model.embedded == 8
    assert model.drawn == 2


def test_without_levels_everything_is_computed(serve):
    """0 and 0 keeps no features."""
    client, model = served(serve, features_l1_mib=0, features_l2_mib=0)
    begin(client, "one", prompt="push")
    begin(client, "two", prompt="pull")
    assert model.embedded == 8


def test_features_survive_a_restart(serve, tmp_path):
    """The next server finds on disk what the first one computed, beside its warm directory."""
    client, model = served(serve, warm_dir=tmp_path / "warm")
    begin(client, "one", prompt="push")
    serve.stop(client)
    assert (tmp_path / "warm-features").is_dir()
    client, model = served(serve, warm_dir=tmp_path / "warm")
    begin(client, "two", prompt="pull")
    assert model.embedded == 0
