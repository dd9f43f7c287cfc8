"""Another model on the same warm directory: a space of its own, the old one ages out, and back."""

from __future__ import annotations

import time

import numpy as np
from tiny_world import HELD, Truth, clip, equal

from ctrlcache.backup import restore
from ctrlcache.couplet import encode_array
from ctrlcache.key import digest
from ctrlcache.tiers.base import Entry, Record
from worldserve.models.tiny import TinyWorldModel
from worldserve.opening import provenance_of
from worldserve.upgrade import kept_before_upgrade

LIMIT = 16 << 20
SETTINGS = {
    "warm_size_bytes": LIMIT,
    "warm_segment_bytes": 1 << 20,
    "flush_interval_s": 0.05,
    "prefetch": "false",
}


def size_bytes(directory):
    return sum(path.stat().st_size for path in directory.iterdir())


def first_answer(client, id="first"):
    return client.ask(HELD, id, frames=clip(2), start=True)


def fill(client, name):
    """Two megabytes of records that are as dear as any of a model, written by its server."""
    records = []
    for n in range(20):
        id = digest(name.encode(), b"%d" % n)
        entry = Entry(id, id, None, 0.0, 0.0, 1_000.0, time.time())
        noise = np.random.default_rng(n).integers(0, 256, 100_000, np.uint8)
        records.append(
            Record(entry, encode_array(noise, provenance_of(client.service.model.spec).digest))
        )
    assert client.service._warm.put(records) == len(records)


def test_an_upgrade_starts_anew_ages_the_old_out_and_can_be_rolled_back(serve, tmp_path):
    """New weights never see what the old ones computed; while they fill the directory, the old
    records go and its limit holds; the directory as it was is kept, and with it and the old weights
    the old answers are back, bit for bit."""
    warm = tmp_path / "cache" / "warm"
    settings = {**SETTINGS, "warm_dir": warm}
    old = serve(model=TinyWorldModel(0), **settings)
    computed = first_answer(old)
    for n in range(1, 9):
        old.ask(HELD + np.float32(0.1 * n), "first")
    assert old.service.drain()
    old.service.cache.flush()
    serve.stop(old)
    again = serve(model=TinyWorldModel(0), **settings)
    assert kept_before_upgrade(warm) == []
    of_the_old = {entry.id for entry in again.service._warm.scan()}
    assert len(of_the_old) >= 8
    serve.stop(again)

    new = serve(model=TinyWorldModel(7), **settings)
    answer = first_answer(new)
    assert answer["CACHE_TIER"][0] == b"none"
    assert equal(answer, Truth(clip(2), [HELD], model=TinyWorldModel(7)).predict(HELD))
    [kept] = kept_before_upgrade(warm)
    for n in range(20):
        fill(new, f"round {n}")
        assert size_bytes(warm) <= LIMIT
        left = of_the_old & {entry.id for entry in new.service._warm.scan()}
        if len(left) <= len(of_the_old) // 4:
            break
    # What is small and dear may stay for long: it costs next to nothing.
    assert len(left) <= len(of_the_old) // 4
    serve.stop(new)

    restore(kept, warm)
    back = serve(model=TinyWorldModel(0), **settings)
    found = first_answer(back)
    assert found["CACHE_TIER"][0] in (b"warm", b"hot")
    assert np.array_equal(found["STATE"], computed["STATE"])
    assert np.array_equal(found["PREDICTED_FRAMES"], computed["PREDICTED_FRAMES"])
