"""A process that writes shared memory until it is killed: what the tests of crashes start.

    python shared_writer.py DIRECTORY SIZE_BYTES SEED [ROUNDS]

Each round is one transaction that moves a session on: its record, a new slice, the pins of its
last three slices. After each one a line says what is durable.
"""

from __future__ import annotations

import sys

import numpy as np

from ctrlcache.key import digest
from ctrlcache.shared import SharedMemory, Transaction
from ctrlcache.tiers.base import Entry, Record

KEPT = 3


def slice_record(seed: int, n: int) -> Record:
    rng = np.random.default_rng([seed, n])
    payload = bytes([n % 256]) * int(rng.integers(10, 60_000))
    id = digest(b"%d.%d" % (seed, n))
    control = rng.uniform(-1, 1, 4).astype(np.float32)
    return Record(Entry(id, digest(b"space"), control, 0.2, 1.0, 5.0, 0.0), payload)


def commit(tx: Transaction, seed: int, n: int) -> None:
    owner = b"session %d" % seed
    tx.put([slice_record(seed, n)])
    tx.pin(owner, [slice_record(seed, n).entry.id])
    if n >= KEPT:
        tx.unpin(owner, [slice_record(seed, n - KEPT).entry.id])
    tx.write("sessions", owner, b"%d" % n)


def main() -> None:
    directory, size_bytes, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    rounds = int(sys.argv[4]) if len(sys.argv) > 4 else 1 << 60
    memory = SharedMemory(directory, size_bytes)
    for n in range(rounds):
        memory.transact(lambda tx, n=n: commit(tx, seed, n))
        print(n, flush=True)
    memory.close()


if __name__ == "__main__":
    main()
