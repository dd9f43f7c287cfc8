"""From a valid request to a turn: the session it belongs to, its new frames and its plan.

Nothing is written here; what is refused here has left no trace.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctrlcache.control import Aligned, DeviceCalibration, OnlineCalibration, align
from ctrlcache.errors import InvalidInput
from ctrlcache.events import EpochBegan, Sink, ignore
from ctrlcache.key import Provenance, context_root, space_id
from worldserve.elsewhere import frame_from_elsewhere
from worldserve.models.protocol import Float, ModelSpec, Pixels, WorldModel
from worldserve.rendering import marked
from worldserve.request import Request
from worldserve.session import Session, session_key
from worldserve.session_store import SessionStore

__all__ = ["AUTO", "Opener", "Turn", "provenance_of"]

#: The device whose statistics are kept as it is used.
AUTO = "auto"
_CONDITIONINGS = 256


def provenance_of(spec: ModelSpec, tenant: str = "", epoch: str = "") -> Provenance:
    """Where the model's answers come from, for one tenant and one calibration of controls."""
    return Provenance(
        model=spec.name,
        version=spec.version,
        weights_digest=spec.weights_digest,
        dtype=spec.dtype,
        frame_px=spec.frame_px,
        calibration_epoch=epoch,
        tenant=tenant,
    )


@dataclass(eq=False)
class Turn:
    """One request on its way through the engine.

    old: the session as stored, None for a new one. taken: the session that is continued under
    another id. here: with the request's frames observed; what is predicted, is predicted from here.
    after: what becomes of the session. plan (H, C), of whose steps `given` were asked for. fresh:
    pixels of the new frames, by context. new_from: index of the first new frame. restore: the
    present was reached by a seek, and it must be certain that it can be computed. elsewhere: the
    last frame of the further view that is asked for, which the session does not observe.
    """

    request: Request
    old: Session | None
    taken: Session | None
    here: Session
    after: Session
    plan: Float
    given: int
    conditioning: Any
    fresh: dict[bytes, Pixels]
    new_from: int | None
    restore: bool
    elsewhere: Pixels | None = None
    times_ms: dict[str, float] = field(default_factory=dict)

    @property
    def space(self) -> bytes:
        space = space_id(self.here.context, len(self.plan), self.request.seed)
        return marked(space, self.request.rendering)

    @property
    def changed(self) -> bool:
        return self.after is not self.old or self.taken is not None


class Opener:
    """Makes turns; safe in several threads."""

    def __init__(
        self,
        model: WorldModel,
        store: SessionStore,
        calibration_dir: Path | None,
        default_device: str = "",
        on_event: Sink = ignore,
    ) -> None:
        self._model = model
        self._spec = model.spec
        self._store = store
        self._calibration_dir = calibration_dir
        self._default_device = default_device
        self._on_event = on_event
        self._devices: dict[str, tuple[int, DeviceCalibration]] = {}
        self._identity = DeviceCalibration.identity(self._spec.control_dim)
        self._conditionings: OrderedDict[tuple[str, str, str], tuple[Any, bytes]] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, request: Request) -> Turn:
        """InvalidInput, SessionNotFound: the request cannot be answered, nothing has happened."""
        old, taken, base = self._find(request)
        elsewhere = None
        if base is None:
            session, frames = self._begin(request), request.frames[1:]
            new_from: int | None = 0
            previous_time = None
        else:
            session, frames = base, request.frames
            elsewhere = frame_from_elsewhere(request, session, self._model)
            if elsewhere is not None:
                frames = frames[:0]
            self._fixed(request, session, () if elsewhere is None else ("view",))
            if request.frame is not None:
                session = session.seek(request.frame)
            previous_time = session.present_time
            new_from = session.present + 1 if len(frames) else None
        conditioning, _ = self.condition(session.prompt, session.view, session.tenant)
        samples, session = self._calibrated(request, session)
        aligned: Aligned = align(
            samples,
            request.sample_times,
            len(frames),
            request.horizon,
            None if elsewhere is not None else request.frame_times,
            previous_time,
            self._spec.frame_interval_s,
        )
        here = session
        if len(frames):
            times = request.frame_times
            here = session.observe(
                aligned.transitions, frames, None if times is None else times[-len(frames) :]
            )
        after = here
        if request.mode == "advance":
            after = here.advance(aligned.plan[: aligned.given], self._spec.frame_interval_s)
        if request.end:
            after = replace(after, ended=True)
        elif after.ended:
            after = replace(after, ended=False)
        fresh = _fresh(here, request.frames, new_from)
        return Turn(
            request=request,
            old=old,
            taken=taken,
            here=here,
            after=after,
            plan=aligned.plan,
            given=aligned.given,
            conditioning=conditioning,
            fresh=fresh,
            new_from=new_from,
            restore=request.mode == "seek",
            elsewhere=elsewhere,
        )

    def condition(self, prompt: str, view: str, tenant: str = "") -> tuple[Any, bytes]:
        """The model's conditioning; InvalidInput where it does not understand. Kept for each tenant
        apart: how long it takes must not tell what others have said."""
        with self._lock:
            found = self._conditionings.get((tenant, prompt, view))
        if found is not None:
            return found
        try:
            made = self._model.condition(prompt, view)
        except ValueError as error:
            raise InvalidInput(f"parameter 'prompt' or 'view': {error}") from None
        with self._lock:
            self._conditionings[tenant, prompt, view] = made
            while len(self._conditionings) > _CONDITIONINGS:
                self._conditionings.popitem(last=False)
            return self._conditionings[tenant, prompt, view]

    # -- the session -----------------------------------------------------------------------------

    def _find(self, request: Request) -> tuple[Session | None, Session | None, Session | None]:
        """(old, taken, base): base is the session to go on from, None for a new one."""
        tenant, id = request.tenant, request.correlation_id
        if not request.start:
            old = self._store.load(tenant, id)
            return old, None, old
        if request.fork_of is not None:
            source = self._store.load(tenant, request.fork_of)
            return None, None, replace(source, id=id, ended=False, taken_from=b"")
        if request.resume is None:
            return None, None, None
        if type(request.resume) is type(id) and request.resume == id:
            old = self._store.load(tenant, id)
            return old, None, old
        wanted = session_key(tenant, request.resume)
        mine = self._store.find(session_key(tenant, id))
        if mine is not None and mine.taken_from == wanted and self._store.find(wanted) is None:
            # The reply to the first attempt was lost: the session has this id already.
            return mine, None, mine
        taken = self._store.load(tenant, request.resume)
        return None, taken, replace(taken, id=id, taken_from=wanted)

    def _begin(self, request: Request) -> Session:
        prompt, view = request.prompt or "", request.view or ""
        device = self._default_device if request.device is None else request.device
        online = ""
        if device == AUTO:
            statistics = OnlineCalibration(self._spec.control_dim)
            online, epoch = json.dumps(statistics.state()), statistics.epoch
        else:
            epoch = self._device(device).epoch
        provenance = provenance_of(self._spec, request.tenant, epoch)
        _, named = self.condition(prompt, view, request.tenant)
        times = request.frame_times
        return Session(
            tenant=request.tenant,
            id=request.correlation_id,
            prompt=prompt,
            view=view,
            device=device,
            created_s=0.0,
            touched_s=0.0,
            first=0,
            present=0,
            digests=(context_root(provenance, named, request.frames[0].tobytes()),),
            controls=np.full((1, self._spec.control_dim), np.nan, np.float32),
            observed=np.ones(1, bool),
            times=np.full(1, np.nan if times is None else times[0]),
            online=online,
        )

    def _fixed(self, request: Request, session: Session, but: Sequence[str] = ()) -> None:
        """What a session was begun with may be said again, not changed."""
        for name in ("prompt", "view", "device"):
            if name in but:
                continue
            asked, is_ = getattr(request, name), getattr(session, name)
            if asked is not None and asked != is_:
                raise InvalidInput(
                    f"parameter {name!r} is fixed when a session begins: it is {is_!r}, "
                    f"got {asked!r}; begin a new session to change it"
                )

    # -- controls --------------------------------------------------------------------------------

    def _device(self, name: str) -> DeviceCalibration:
        if not name:
            return self._identity
        if self._calibration_dir is None:
            raise InvalidInput(
                f"parameter 'device' must be {AUTO!r} or empty on this server, which has no "
                f"calibration_dir, got {name!r}"
            )
        try:
            written_ns = (self._calibration_dir / f"{name}.json").stat().st_mtime_ns
        except (OSError, ValueError):
            written_ns = -1  # absent: loading it says so
        known = self._devices.get(name)
        if known is None or known[0] != written_ns:
            device = DeviceCalibration.load(self._calibration_dir, name, self._spec.control_dim)
            if known is not None and device.epoch != known[1].epoch:
                self._on_event(EpochBegan())
            known = self._devices[name] = (written_ns, device)
        return known[1]

    def _calibrated(self, request: Request, session: Session) -> tuple[Float, Session]:
        """The samples in calibrated units, and the session, which may have learnt from them."""
        if session.device != AUTO:
            return self._device(session.device).apply(request.samples), session
        statistics = OnlineCalibration.from_state(json.loads(session.online))
        if statistics.observe(request.samples):
            self._on_event(EpochBegan())
        return statistics.apply(request.samples), replace(
            session, online=json.dumps(statistics.state())
        )


def _fresh(here: Session, frames: Pixels, new_from: int | None) -> dict[bytes, Pixels]:
    if new_from is None:
        return {}
    contexts: list[bytes] = [here.context_at(new_from + i) for i in range(len(frames))]
    pixels: NDArray[np.uint8] = frames
    return dict(zip(contexts, pixels, strict=True))
