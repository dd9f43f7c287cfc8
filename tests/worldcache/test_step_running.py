"""Carrying out reuse: whose result stands in for whose, and that nothing leaks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from worldcache.content import Content, Rung
from worldcache.policies import Always, Chunkwise, Schedule
from worldcache.running import Reuse


def outputs(step, rows):
    """What a model would give for these rows: 100 x row + step."""
    return torch.tensor([[100.0 * row + step] for row in rows])


def run(reuse, chunks, steps):
    made = []
    for step in range(steps):
        rows = reuse.rows(step, torch.zeros(chunks, 1))
        made.append(reuse.fill(outputs(step, rows) if rows else None)[:, 0].tolist())
    return made


def test_rows_follow_schedules_of_their_own():
    """Each chunk holds the result of its own last computed step."""
    reuse = Reuse(Schedule(steps=((0, 3), (0, 1, 3))), chunks=2, steps=4)
    assert run(reuse, 2, 4) == [[0, 100], [0, 101], [0, 101], [3, 103]]
    assert reuse.computed_steps == ((0, 3), (0, 1, 3))


def test_a_reused_step_never_feeds_the_history():
    """Extrapolation goes on from computed steps only: 0 -> 1, then half as far again, each time."""
    slopes = (((0, 1, 2), 0.5), ((0, 1, 3), 0.5))
    reuse = Reuse(Schedule(steps=((0, 1),), slopes=slopes), chunks=1, steps=5)
    assert run(reuse, 1, 5) == [[0], [1], [1.5], [1.5], [4]]


def test_what_is_held_is_not_touched_by_later_steps():
    """A result that was handed out stays what it was."""
    reuse = Reuse(Schedule(steps=((0,), (0, 1))), chunks=2, steps=3)
    reuse.rows(0, torch.zeros(2, 1))
    first = reuse.fill(outputs(0, [0, 1]))
    kept = first.clone()
    rows = reuse.rows(1, torch.zeros(2, 1))
    assert rows == [1]
    reuse.fill(outputs(1, rows))
    assert torch.equal(first, kept)


def test_chunks_borrow_from_an_earlier_one_that_computes():
    reuse = Reuse(Chunkwise(period=3), chunks=4, steps=3)
    assert run(reuse, 4, 3)[1] == [1, 1, 1, 301]


def test_chunks_do_not_borrow_across_a_change_of_control():
    controls = np.array([[0.0], [0.0], [0.5], [0.5]])
    reuse = Reuse(Chunkwise(period=4), chunks=4, steps=3, controls=controls)
    assert run(reuse, 4, 3)[1] == [1, 1, 201, 201]


def test_content_waits_for_its_weights():
    """Without activities everything is computed; with them, each chunk as its own asks for."""
    policy = Content(ladder=(Rung((0, 3), 1.0),), quality_db=40)
    reuse = Reuse(policy, chunks=2, steps=4)
    assert reuse.rows(0, torch.zeros(2, 1)) == [0, 1]
    reuse.fill(outputs(0, [0, 1]))
    reuse.weigh([0.1, 50.0])
    assert reuse.rows(1, torch.zeros(2, 1)) == [1]


def test_everything_is_computed_without_a_policy():
    assert run(Reuse(Always(), 3, 3), 3, 3) == [[s, 100 + s, 200 + s] for s in range(3)]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_requests_in_turns_are_each_as_alone(order):
    """Scopes of two requests that share a policy do not see each other."""
    policy = Schedule(steps=((0, 2), (0, 1)))
    alone = [run(Reuse(policy, size, steps), size, steps) for size, steps in ((2, 4), (3, 5))]
    pair = [Reuse(policy, 2, 4), Reuse(policy, 3, 5)]
    made = [[], []]
    for step in range(5):
        for which in order:
            reuse, (size, steps) = pair[which], ((2, 4), (3, 5))[which]
            if step < steps:
                rows = reuse.rows(step, torch.zeros(size, 1))
                out = reuse.fill(outputs(step, rows) if rows else None)
                made[which].append(out[:, 0].tolist())
    assert made == alone
