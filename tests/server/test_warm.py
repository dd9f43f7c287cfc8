"""Warm-up requests through the real server: they answer, and what follows is found."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_world import HELD, clip
from wire import eventually, metric

STAGES = ("align", "encode", "lookup", "dynamics", "decode", "total")


def stages(answer):
    """Milliseconds by stage; one that was not gone through has exactly 0."""
    return dict(zip(STAGES, answer["TIMING_MS"], strict=True))


@pytest.fixture
def start_over(start_tiny, tmp_path, connect):
    """Servers over one warm directory, one after the other."""
    running = []

    def start(**parameters):
        if running:
            running[-1].stop()
        running.append(
            start_tiny(instances=1, warm_dir=tmp_path / "warm", parameters={**parameters})
        )
        return running[-1], connect(running[-1])

    return start


def begin(wire, id, prompt, **extra):
    return wire.ask(HELD, id, start=True, frames=clip(16, 900), prompt=prompt, **extra)


def warm(wire, prompt, id="warm"):
    """One request with START and END; a client that waits for ever would be no answer."""
    answer = wire.ask(
        HELD, id, ("CONFIDENCE",), start=True, end=True, mode="warm", prompt=prompt,
        client_timeout=60.0,
    )  # fmt: skip
    return float(answer["CONFIDENCE"][0])


def warmed(runtime, how):
    """Rehearsals, by how they were chosen."""
    return metric(runtime.endpoints, "worldcache_warmed_total", how=how) or 0


def test_a_warm_up_answers_and_the_next_session_computes_nothing(start_over):
    """At once after a first session the recipe is known; after a restart and a warm-up in other
    words nothing is encoded, rolled out or drawn, while words that nobody announced cost a
    rollout; and the answer is the same, bit for bit."""
    _, wire = start_over()
    first = begin(wire, "a", "push the cube")
    assert stages(first)["encode"] > 0
    assert warm(wire, "push the cube") > 0.99
    runtime, wire = start_over()
    unannounced = begin(wire, "b", "kindly push the cube")
    assert unannounced["CACHE_TIER"][0] == b"none"
    assert stages(unannounced)["dynamics"] > 0
    assert warm(wire, "please push the cube") >= 0.75
    # Both recipes, each under its own prompt and under the announced one.
    eventually(lambda: warmed(runtime, "semantic") == 4)
    missed = metric(runtime.endpoints, "worldcache_lookups_total", result="miss")
    answer = begin(wire, "c", "please push the cube")
    assert answer["CACHE_TIER"][0] != b"none"
    assert answer["EXACT"][0]
    assert [stages(answer)[stage] for stage in ("encode", "dynamics", "decode")] == [0, 0, 0]
    assert metric(runtime.endpoints, "worldcache_lookups_total", result="miss") == missed
    truth = begin(wire, "d", "please push the cube", cache="off")
    for name in ("STATE", "PREDICTED_FRAMES"):
        assert np.array_equal(answer[name], truth[name])


def test_an_unknown_prompt_follows_the_policy(start_over):
    """partial_load loads some of what there is, full_load all, skip nothing; all of them answer."""
    _, wire = start_over()
    for number in range(3):
        wire.ask(
            HELD, f"s{number}", start=True, end=True, frames=clip(4, 910 + number),
            prompt=f"push cube {number}", drain=True,
        )  # fmt: skip
    for policy, loaded in (("partial_load", 2), ("full_load", 3), ("skip", 0)):
        runtime, wire = start_over(fallback_policy=policy, warmup_steps="4")
        assert warm(wire, "zzz") < 0.75
        eventually(lambda r=runtime, how=policy, n=loaded: warmed(r, how) == n)
