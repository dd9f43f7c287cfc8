"""Answers that are computed before the question: where frames were shown and nothing was asked."""

from __future__ import annotations

import numpy as np
import pytest
from tiny_world import HELD, Truth, clip, equal

SHOWN = ("TIMING_MS",)
FRAMES = clip(8)


def show(client, frames, id="s", **options):
    """Frames with a hand that holds HELD all the time; then all there is to think."""
    transitions = np.tile(HELD, (len(frames) + (not options.get("start")), 1))
    client.ask(transitions, id, frames=frames, outputs=SHOWN, **options)
    assert client.service.drain()


def truth(frames):
    return Truth(frames, np.tile(HELD, (len(frames) - 1, 1)))


@pytest.mark.parametrize(
    ("options", "tier"), [({}, "hot"), ({"prefetch": "false"}, "none")], ids=["on", "off"]
)
def test_where_the_hand_is_when_the_video_has_run_on(serve, options, tier):
    """A question about the control that is held, at the new present: known, exact, with frames."""
    client = serve(**options)
    client.ask(HELD, frames=FRAMES[:3], start=True)
    show(client, FRAMES[3:6])
    got = client.ask(HELD)
    assert bytes(got["CACHE_TIER"][0]).decode() == tier
    assert equal(got, truth(FRAMES[:6]).predict(HELD))


def test_a_new_session_is_expected_to_ask_as_its_tenant_does(serve):
    """Its first question is known; that of somebody whose tenant never asked is not."""
    client = serve()
    client.ask(HELD, "first", frames=FRAMES[:2], start=True)
    for tenant, tier in (("", "hot"), ("other", "none")):
        show(client, FRAMES[:5], f"of {tenant}", start=True, tenant=tenant)
        got = client.ask(HELD, f"of {tenant}", tenant=tenant)
        assert bytes(got["CACHE_TIER"][0]).decode() == tier
        assert equal(got, truth(FRAMES[:5]).predict(HELD))


def test_what_is_not_to_be_cached_is_not_expected_either(serve):
    """With cache=off nothing is computed ahead."""
    client = serve()
    client.ask(HELD, frames=FRAMES[:3], start=True)
    show(client, FRAMES[3:6], cache="off")
    assert bytes(client.ask(HELD)["CACHE_TIER"][0]).decode() == "none"
