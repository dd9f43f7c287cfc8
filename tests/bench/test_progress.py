"""How long a benchmark still takes, said from what it has taken."""

from __future__ import annotations

import pytest

from worldserve.bench.progress import Load, TimeLeft, in_words


def test_time_left_follows_what_was_measured():
    """Pauses are known beforehand; starts and answers are as long as they have been so far."""
    now = [0.0]
    left = TimeLeft({"a": Load(4, 8.0), "b": Load(4, 8.0)}, lambda: now[0])
    assert left.seconds == pytest.approx(2 * (10 + 8 + 4 * 0.5))  # guesses
    left.starting("a")
    now[0] += 20 + 2
    left.acted(2.0)  # the server took 20 s
    assert left.seconds == pytest.approx((6 + 3 * 0.5) + (20 + 8 + 4 * 0.5))
    for _ in range(3):
        now[0] += 3 + 2
        left.acted(2.0)  # an answer takes 3 s
    left.done()
    assert left.seconds == pytest.approx(20 + 8 + 4 * 3)


@pytest.mark.parametrize(
    ("seconds", "words"), [(41.4, "41 s"), (99.4, "99 s"), (150, "2 min"), (12_600, "3.5 h")]
)
def test_durations_are_said_as_people_do(seconds, words):
    assert in_words(seconds) == words
