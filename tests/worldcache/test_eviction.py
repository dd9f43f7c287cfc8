"""The weighted score: each part counts, and scans do not push out the useful."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ctrlcache.errors import ConfigError
from worldcache.eviction import Importance, Scale, Standing, Usual, Weights, score
from worldcache.experience import Experience
from worldcache.shelf import Held, Shelf

PLAIN = Standing(size_bytes=1_000, cost_ms=10.0, importance=0.5, last_used_s=100.0)
USUAL = Usual(per_byte=5e-3, interval_s=10.0)


@pytest.mark.parametrize(
    "better",
    [
        {"cost_ms": 100.0},
        {"size_bytes": 100},
        {"importance": 0.9},
        {"last_used_s": 109.0},
        {"dependents": 3},
    ],
)
def test_each_part_counts(better):
    """What is costlier, smaller, more important, more recent or needed by others stays longer."""
    assert score(replace(PLAIN, **better), 110.0, USUAL) > score(PLAIN, 110.0, USUAL)


@settings(max_examples=60)
@given(
    st.builds(
        Standing,
        st.integers(1, 1 << 40),
        st.floats(0, 1e9),
        st.floats(0, 1),
        st.floats(0, 1e9),
        st.integers(0, 99),
        st.integers(0, 99),
    ),
    st.floats(0, 1e9),
    st.builds(Usual, st.floats(1e-12, 1e6), st.floats(1e-3, 1e6)),
)
def test_the_score_is_a_share(standing, now_s, usual):
    """From 0 to 1, whatever it is asked about."""
    assert 0 <= score(standing, now_s, usual) <= 1


def test_half_of_the_weight_is_the_cost():
    """The other parts being equal, a worthless feature and a priceless one are 0.5 apart."""
    cheap = score(replace(PLAIN, cost_ms=1e-3), 100.0, USUAL)
    dear = score(replace(PLAIN, cost_ms=1e12), 100.0, USUAL)
    assert dear - cheap == pytest.approx(0.5, abs=1e-3)


def test_a_cost_that_nobody_knows_is_the_usual_one():
    """Between the worthless and the priceless; and it does not change what is usual."""
    scale = Scale()
    for _ in range(20):
        scale.stored(replace(PLAIN, importance=0.5, cost_ms=40.0))
    usual = scale()
    scale.stored(replace(PLAIN, importance=0.5, cost_ms=0.0))
    assert scale() == usual
    unknown, known = (
        score(replace(PLAIN, importance=0.5, cost_ms=cost), 100.0, usual) for cost in (0.0, 40.0)
    )
    assert unknown == pytest.approx(known, rel=1e-6)
    assert score(replace(PLAIN, importance=0.5, cost_ms=1e-3), 100.0, usual) < unknown


def test_weights_add_up():
    """Weights that do not, or are negative, are refused."""
    for weights in ({"recompute": 0.6}, {"recompute": 0.8, "recency": -0.1}):
        with pytest.raises(ConfigError, match="add up to 1"):
            Weights(**weights)


def test_kinds_that_return_are_told_from_those_that_do_not():
    """What kind a feature is of, and how often it was used, says how likely it is to return."""
    importance = Importance()
    for _ in range(100):
        importance.stored("answer")
        importance.used("answer", 0)
        importance.stored("guess")
    assert importance("answer") > 0.9
    assert importance("guess") < 0.1
    assert importance("answer", 1) < 0.1  # used once, and never again
    assert importance("unknown") == 0.5


def test_the_usual_interval_is_learnt():
    """Half of the uses come sooner than the interval, half later."""
    scale = Scale()
    for i in range(400):
        scale.used(2.0 if i % 2 else 8.0)
    assert 1.8 < scale().interval_s < 9


def test_a_scan_does_not_push_out_what_returns():
    """Things stored ahead that nobody asks for leave first, though they are the newest."""
    shelf: Shelf[None] = Shelf(20_000, Weights())
    experience = Experience()
    now = 0.0

    def put(id, kind):
        standing = experience.arrived(id, kind, 1_000, 10.0, now)
        while shelf.size_bytes + 1_000 > shelf.limit_bytes:
            shelf.pop(shelf.least(now, experience.usual))
        shelf.add(id, Held(None, standing, kind, b""))

    for round in range(40):
        for n in range(8):
            now += 0.1
            held = shelf.get(b"useful%d" % n)
            if held is None:
                put(b"useful%d" % n, "asked")
            else:
                experience.used(held, now)
        for n in range(30):
            now += 0.01
            put(b"scan%d-%d" % (round, n), "ahead")
    assert all(b"useful%d" % n in shelf for n in range(8))


def test_what_comes_back_is_remembered():
    """A feature that left and is stored again stands where one does that was used as often; one
    that was never here, or was stored ahead, or left too long ago, does not."""
    experience = Experience(most_remembered=3)
    first = experience.arrived(b"a", "k", 100, 1.0, 0.0)
    experience.used(Held(None, first, "k", b""), 2.0)
    again = experience.arrived(b"a", "k", 100, 1.0, 5.0)
    assert (first.uses, again.uses, again.last_used_s) == (1, 2, 5.0)
    assert experience.arrived(b"a", "k", 100, 1.0, 6.0, asked=False).uses == 0
    for other in (b"b", b"c", b"d"):
        assert experience.arrived(other, "k", 100, 1.0, 7.0).uses == 0
    assert experience.arrived(b"a", "k", 100, 1.0, 8.0).uses == 0


def test_what_comes_back_from_disk_is_remembered():
    """The disk keeps no standings: uses go on where they were, also over a second absence."""
    experience = Experience()
    standing = experience.arrived(b"a", "k", 100, 1.0, 0.0)
    experience.used(Held(None, standing, "k", b""), 2.0)
    assert experience.returned(b"a", 100, 1.0, 5.0).uses == 2
    assert experience.returned(b"a", 100, 1.0, 6.0).uses == 3
    assert experience.returned(b"unknown", 100, 1.0, 6.0).uses == 1


def test_the_limit_cannot_be_passed():
    """A shelf takes nothing that does not fit, whoever asks."""
    shelf: Shelf[None] = Shelf(1_500, Weights())
    shelf.add(b"a", Held(None, replace(PLAIN), "", b""))
    with pytest.raises(ValueError, match="no room"):
        shelf.add(b"b", Held(None, replace(PLAIN), "", b""))
    assert shelf.least(0.0, USUAL, but=b"a") is None
