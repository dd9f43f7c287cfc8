"""Two instances of a server: one cache, one memory of sessions, and help where one is idle."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tiny_world import HELD, Truth, clip, equal
from wire import InferenceServerException, code, eventually, metric

pytestmark = pytest.mark.server


def test_two_instances_share_everything(start_tiny, connect):
    """Sessions move between instances, couplets are found by both, metrics are kept apart."""
    runtime = start_tiny(instances=2)
    wires = [connect(runtime) for _ in range(4)]
    frames = clip(3)
    truth = Truth(frames, [HELD] * 2)

    def work(number):
        wire = wires[number % 4]
        first = wire.ask(HELD, number, frames=frames, start=True)
        wire.ask(HELD * 0.5, number, mode="advance", outputs=["STATE"])
        return first

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(work, range(1, 33)))
    assert all(equal(got, truth.predict(HELD)) for got in answers)
    truth.leave(HELD * 0.5)
    # A sequence that begins anew may be given to the other instance.
    for number in range(1, 33):
        got = wires[0].ask(-HELD, number, start=True, resume=number)
        assert equal(got, truth.predict(-HELD))

    def both():
        hits = [
            metric(
                runtime.endpoints,
                "ctrlcache_lookups_total",
                tier="hot",
                result="exact",
                instance=f"world_model_0_{i}",
            )
            for i in range(2)
        ]
        return all(hits)

    eventually(both)


def test_an_idle_instance_probes_for_a_busy_one(start_tiny, connect):
    """One user, two instances: the one that does not answer him scores what the other computed."""
    runtime = start_tiny(instances=2)
    wire = connect(runtime)

    def probes(instance):
        labels = {"instance": f"world_model_0_{instance}", "score": "probe"}
        return metric(runtime.endpoints, "ctrlcache_score_seconds_count", **labels) or 0

    def computed(instance):
        labels = {"instance": f"world_model_0_{instance}", "source": "computed"}
        return metric(runtime.endpoints, "ctrlcache_answers_total", **labels) or 0

    wire.ask(HELD, 1, frames=clip(3, seed=70), start=True)
    wire.ask(-HELD, 1)
    got = wire.ask(HELD, 1, drain=True)
    assert np.isfinite(got["SCORES"]).all()
    # Each instance hands its metrics over in its own time.
    eventually(lambda: sum(map(probes, range(2))) == 2 and any(map(computed, range(2))))
    [answering] = [i for i in range(2) if computed(i)]
    assert probes(1 - answering)


def test_marked_sessions_never_mix(start_tiny, repository, connect):
    """Few places, many sessions, none ended, over the ensemble and two instances: each session
    sees its own frames, whenever it comes back."""
    small = repository(
        {"600000000": "1000000", "candidate_sequences: 16384": "candidate_sequences: 4"}
    )
    runtime = start_tiny(
        model_repository=small,
        models=("world_model", "cold_templates", "interactive_world"),
        instances=2,
    )
    count = 12
    truths = {n: Truth(clip(2, seed=n), [HELD]) for n in range(1, count + 1)}

    def live(number):
        wire = connect(runtime, model="interactive_world" if number % 2 else "world_model")
        draw, wrong = random.Random(number), 0
        wire.ask(HELD, number, frames=clip(2, seed=number), start=True)
        for _ in range(5):
            step = np.array([draw.uniform(-1, 1), draw.uniform(-1, 1)], np.float32)
            options = {}
            for _ in range(20):
                try:
                    got = wire.ask(step, number, outputs=["STATE"], mode="advance", **options)
                    break
                except InferenceServerException as error:
                    if code(error) not in ("invalid", "unavailable"):
                        raise
                    # The batcher gave the place away: come back for the session.
                    options = {"start": True, "resume": number}
            expected, _ = truths[number].predict(step)
            truths[number].leave(step)
            wrong += not np.array_equal(got["STATE"], expected)
        return wrong

    with ThreadPoolExecutor(count) as pool:
        assert sum(pool.map(live, range(1, count + 1))) == 0
