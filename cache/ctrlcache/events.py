"""What happened, as frozen events; the caches call a *sink* with them and know nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

__all__ = [
    "Admitted",
    "Answered",
    "BlocksDecided",
    "Calibrated",
    "ColdRequest",
    "Corrupt",
    "EpochBegan",
    "Event",
    "Evicted",
    "FreeSpace",
    "Heartbeat",
    "HitError",
    "Lookup",
    "Refused",
    "Saved",
    "Scored",
    "SessionCount",
    "Sink",
    "StoreEvicted",
    "StoreLookup",
    "StoreSize",
    "TierFailed",
    "TierSize",
    "Warmed",
    "fan_out",
    "ignore",
]


@dataclass(frozen=True, slots=True)
class Lookup:
    """One look-up in one tier; result: `exact`, `near` (a neighbour within trust) or `miss`."""

    tier: str
    result: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Answered:
    """A request was answered. source: `exact` or `near` (from the cache), `computed` after a miss,
    `bypass` where the cache was not to be asked, `none` where nothing was to be predicted.
    seconds: (stage, how long it took), of the stages that took place."""

    mode: str
    source: str
    seconds: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """A request got an error; reason: `invalid`, `not_found`, `full` (sessions), `overload`,
    `conflict`, `unavailable`, `cancelled` or `failed` (a fault of the server's)."""

    reason: str


@dataclass(frozen=True, slots=True)
class Scored:
    """A couplet was scored; score: `probe`, `stability`, `transferability`; seconds it took."""

    score: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Admitted:
    """An admission was decided; decision: the `reason` of the Admission."""

    decision: str


@dataclass(frozen=True, slots=True)
class TierSize:
    """A tier's present size; limit_bytes: what it may grow to, 0 where that is not known."""

    tier: str
    entries: int
    size_bytes: int
    limit_bytes: int = 0


@dataclass(frozen=True, slots=True)
class TierFailed:
    """A tier could not do what it was asked to, as a full or read-only disk cannot."""


@dataclass(frozen=True, slots=True)
class FreeSpace:
    """What is free on a file system; place: `shm` or `warm`."""

    place: str
    free_bytes: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Evicted:
    """Records left a tier; reason: `bytes`, `entries`, `expired`, `superseded` ..."""

    tier: str
    reason: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class HitError:
    """True relative state error of an approximate answer, from a sampled recomputation. bound:
    what the answer had stated, None where that is not known."""

    error: float
    bound: float | None = None


@dataclass(frozen=True, slots=True)
class Saved:
    """Seconds of computation that a hit made unnecessary."""

    seconds: float


@dataclass(frozen=True, slots=True)
class SessionCount:
    """Sessions alive now, and how many may be; 0 where that is not known."""

    count: int
    limit: int = 0


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Whether there is a calibration for the weights served: without one, only exact answers."""

    present: bool


@dataclass(frozen=True, slots=True)
class EpochBegan:
    """A device's calibration changed: what was cached under the old numbers is not found again."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The process that serves is running; Unix time."""

    now_s: float


@dataclass(frozen=True, slots=True)
class Corrupt:
    """Stored bytes of a tier failed their checksum or layout."""

    tier: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class ColdRequest:
    """A request to the object store ended; result: `hit`, `miss`, `error`, `timeout` ..."""

    result: str


@dataclass(frozen=True, slots=True)
class BlocksDecided:
    """Generator blocks computed or reused; decision: `compute` or `reuse`."""

    decision: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class StoreSize:
    """Present size of a feature store level: `l1`, `l2`, `l3`."""

    level: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class StoreEvicted:
    """Features left a store level."""

    level: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class StoreLookup:
    """A feature was asked for; level: where it was found, `none` where it was not; result: `hit` or
    `miss`."""

    level: str
    result: str


@dataclass(frozen=True, slots=True)
class Warmed:
    """Features loaded ahead; how: `semantic` (the prompt was understood), or the fallback."""

    how: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class BackgroundLost:
    """Background work that was not done. reason: `dropped` (no room for it among what waits), or
    `refused` (it could not be done: a session that is gone, a tier that is away)."""

    reason: str
    count: int = 1


Event = (
    Lookup
    | Answered
    | Refused
    | Scored
    | Admitted
    | TierSize
    | TierFailed
    | FreeSpace
    | Evicted
    | HitError
    | Saved
    | SessionCount
    | Calibrated
    | EpochBegan
    | Heartbeat
    | Corrupt
    | ColdRequest
    | BlocksDecided
    | StoreSize
    | StoreEvicted
    | StoreLookup
    | Warmed
    | BackgroundLost
)
#: Takes an event; quick, thread-safe, and never raises for an event it does not care about.
Sink = Callable[[Event], None]


def ignore(event: Event) -> None:
    """The sink for those who measure nothing."""


def fan_out(*sinks: Sink) -> Sink:
    """One sink that hands every event to all of `sinks`, in order."""

    def send(event: Event) -> None:
        for sink in sinks:
            sink(event)

    return send
