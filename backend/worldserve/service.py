"""One served world model: everything between a request's arrays and its reply, put together.

Knows no Triton. `put` may be called from any thread; replies come from the engine's own.
"""

from __future__ import annotations

import heapq
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from ctrlcache.admission import make_policy
from ctrlcache.calibration import TrustModel, trust_path
from ctrlcache.config import CacheConfig
from ctrlcache.errors import CalibrationError, ConfigError, TierUnavailable
from ctrlcache.metrics import Calibrated, Sink, ignore
from ctrlcache.shared import SharedMemory
from ctrlcache.tiered import CoupletCache
from ctrlcache.tiers.warm import WarmTier
from ctrlcache.trace import Recorder
from ctrlcache.transfer import Adapter, BestOf, Jacobian, Migration, Reuse
from worldserve.accounts import Accounts
from worldserve.background import Background, Urgency
from worldserve.cold import TaskTemplates, announce_model, open_cold_store
from worldserve.drawing import Drawing
from worldserve.engine import Engine, Reply
from worldserve.features import Features, open_levels
from worldserve.gate import Gate, Overloaded
from worldserve.inheritance import Inheritance
from worldserve.memory import give_back
from worldserve.models.protocol import Float, WorldModel
from worldserve.opening import Opener, provenance_of
from worldserve.options import ServeOptions, load_model
from worldserve.recall import Recall
from worldserve.rendering import configured
from worldserve.request import RawRequest, RequestLimits, parse_request
from worldserve.scheduler import Scheduler
from worldserve.scoring import Bench, ThinkingConfig
from worldserve.session_store import SessionLimits, SessionStore, capacity
from worldserve.siblings import Siblings
from worldserve.thinking import Thinking
from worldserve.tracing import Spans
from worldserve.upgrade import keep_before_upgrade
from worldserve.vitals import Vitals
from worldserve.warmth import open_warmth, prime

__all__ = ["WorldService"]

_log = logging.getLogger(__name__)
_ADAPTER = "adapter.safetensors"
_HOUSEKEEPING_S = 5.0
_GIVE_BACK_S = 60.0
_MOST_LOADED = 65_536


class WorldService:
    """parameters: of the model's configuration. directory: of the model version. name: of the
    instance, for metrics. Opening raises ConfigError for what is wrong with them."""

    def __init__(
        self,
        parameters: Mapping[str, str],
        directory: Path,
        name: str = "world_model_0",
        on_event: Sink = ignore,
        model: WorldModel | None = None,
    ) -> None:
        options, others = ServeOptions.from_mapping(parameters)
        config = CacheConfig.from_mapping(others)
        threads = options.threads or _threads_of_environment()
        self.model = model or load_model(options, directory, threads)
        self.options = options
        self.name = name
        spec = self.model.spec
        weights = Path(options.weights_dir) if options.weights_dir else directory
        trust = _trust(weights, spec.weights_digest)
        provenance = provenance_of(spec).digest
        self._limits = RequestLimits(
            horizon=options.default_horizon,
            max_frames=options.max_frames,
            max_pixels=options.max_frame_pixels,
            max_request_pixels=options.max_request_pixels,
            rendering=configured(
                spec, options.generator_steps, options.reuse, options.reuse_quality_db
            ),
        )
        if spec.reuse:
            self.model.on_event = on_event  # type: ignore[attr-defined]
        self._memory = SharedMemory(
            config.hot.directory,
            config.hot.size_bytes,
            config.hot.eviction,
            on_event=on_event,
        )
        if config.warm.dir is not None:
            keep_before_upgrade(Path(config.warm.dir), provenance.hex(), options.keep_previous)
        self._warm = _warm(config, on_event)
        self._trace = Recorder(config.trace.file) if config.trace.file else None
        self.background = Background()
        migration = _migration(config.trust.migration, weights, spec.weights_digest)
        self.cache = CoupletCache(
            self._memory,
            self._warm,
            provenance,
            make_policy(config.trust.policy, trust, config.trust.max_error),
            migration,
            config,
            on_event,
            checkpoint=self.background.give_way,
            trace=self._trace,
        )
        self.sessions = SessionStore(
            self._memory, provenance, self._session_limits(config, options), on_event
        )
        calibrations = Path(options.calibration_dir) if options.calibration_dir else None
        opener = Opener(self.model, self.sessions, calibrations, options.default_device, on_event)
        self._features = Features(
            self.model,
            open_levels(options, config, provenance, on_event),
            lambda work: self.background.submit(Urgency.LATER, lambda _: work()),
        )
        recall = Recall(
            self.model, self.cache, options.recall_contexts, self._features, options.resume
        )
        inheritance = Inheritance(trust, migration, spec.state_scale, config.trust.max_error)
        self._templates = TaskTemplates(
            open_cold_store(config.cold, provenance, on_event),
            provenance,
            config.cold.min_confidence,
            inheritance,
        )
        announce_model(self._memory, spec, provenance)
        drawing = Drawing(self.cache, trust)
        bench = Bench(self.model, self.cache, recall, options.probe_batch)
        self._warmth = open_warmth(
            options, config, bench, opener, self.background, self._templates, on_event
        )
        thinking = Thinking(
            bench,
            self.background,
            ThinkingConfig(
                think=options.background,
                probe_radius=options.probe_radius or (trust.probe_radius if trust else 0.1),
                rho_max=trust.rho_max if trust else 1.0,
                prefetch=options.prefetch,
                keep_probes=options.keep_probes,
                error_samples=options.error_samples,
            ),
            self._templates,
            inheritance,
            drawing,
            on_event,
        )
        self._siblings = self._open_siblings(config, provenance, thinking)
        engine = Engine(
            self.model,
            self.cache,
            self.sessions,
            opener,
            recall,
            self._warmth.watching(thinking),
            drawing,
            provenance,
            options.max_error,
            on_event,
            self._features,
        )
        self._fill_hot(config, options.warmup_share)
        prime(bench, options.warmup_steps, options.default_horizon)
        for prompt in filter(None, options.warm_prompts.split("|")):
            self._warmth.warm(prompt.strip(), "", _go_on)
        if config.trust.policy == "trust":
            on_event(Calibrated(trust is not None))
        places = {"shm": config.hot.directory}
        if config.warm.dir is not None:
            places["warm"] = config.warm.dir
        self._vitals = Vitals(self.cache, self.sessions, self.background, places, on_event)
        self._spans = Spans(options.trace_url, name) if options.trace_url else None
        self._accounts = Accounts(on_event, spans=self._spans)
        self._gate = Gate(options.max_waiting, options.max_waiting_of_session)
        self._decoders = ThreadPoolExecutor(2, "decode")
        self._closed = threading.Event()
        self._housekeeper = threading.Thread(
            target=self._keep_house, name="housekeeping", daemon=True
        )
        self._housekeeper.start()
        self._scheduler = Scheduler(
            engine,
            self.background,
            options.batch_wait_ms / 1e3,
            options.most_in_batch,
            self._when_idle,
        )

    @property
    def description(self) -> str:
        """One line for the log."""
        spec = self.model.spec
        return (
            f"{self.name}: {spec.name} {spec.version} ({spec.weights_digest[:12]}, {spec.dtype}), "
            f"controls {spec.control_dim}, states {spec.state_dim}, frames {spec.frame_px}, "
            f"physics {', '.join(spec.physics_names)}; at most {self.sessions.limits.most} sessions"
        )

    def put(self, raw: RawRequest, deliver: Callable[[Reply | Exception], None]) -> None:
        """Have a request answered; `deliver` is called once, also with what is wrong with it."""
        deliver = self._accounts.of(raw, deliver)
        try:
            deliver = self._gate.enter(raw, deliver)
        except Overloaded as error:
            deliver(error)
            return
        if raw.parameters.get("mode") == "warm":
            self._warmth.answer(raw, deliver)
            return
        if "FRAMES_ENCODED" in raw.inputs:
            # Decoding takes milliseconds, in which other sessions' requests must come in.
            self._decoders.submit(self._take_in, raw, deliver)
        else:
            self._take_in(raw, deliver)

    def _take_in(self, raw: RawRequest, deliver: Callable[[Reply | Exception], None]) -> None:
        try:
            with self.background.floor():
                request = parse_request(raw, self.model.spec, self._limits)
                self._scheduler.put(request, deliver)
        except Exception as error:
            deliver(error)

    def drain(self, timeout_s: float = 60.0) -> bool:
        """Wait until thinking time has nothing left to do; whether that was so in time."""
        done = threading.Event()
        self._when_idle(done.set)
        return done.wait(timeout_s)

    def _when_idle(self, call: Callable[[], None]) -> None:
        """Call `call` when nothing is left to do here, nor at siblings for this instance."""
        siblings = self._siblings
        if siblings is None:
            self.background.when_idle(call)
        else:
            self.background.when_idle(lambda: siblings.when_done(call))

    def close(self) -> None:
        """Answer what waits, write what must not be lost, let go of everything."""
        self._closed.set()
        self._housekeeper.join()
        self._decoders.shutdown()
        if self._siblings is not None:
            self._siblings.close()
        self.background.close()
        self._scheduler.close()
        self._templates.close()
        self._features.close()
        self.cache.close()
        if self._spans is not None:
            self._spans.close()
        if self._trace is not None:
            self._trace.close()
        if self._warm is not None:
            self._warm.close()
        self._memory.close()

    def _open_siblings(
        self, config: CacheConfig, provenance: bytes, thinking: Thinking
    ) -> Siblings | None:
        """The other instances on the same memory, where there can be any."""
        options = self.options
        if not (options.background and options.share_thinking and config.hot.directory):
            return None
        directory = Path(config.hot.directory) / "siblings"
        try:
            siblings = Siblings(
                directory, provenance, self.model, self.background, thinking.probe_for
            )
        except OSError as error:
            _log.warning(
                "instances do not help each other: %s cannot be used: %s", directory, error
            )
            return None
        thinking.helped_by(siblings)
        return siblings

    def _fill_hot(self, config: CacheConfig, share: float) -> None:
        """Load what is worth most from the warm tier, before the first request comes."""
        if self._warm is None or not share:
            return
        room = int(config.hot.size_bytes * share)
        best = heapq.nlargest(
            _MOST_LOADED, self._warm.scan(), key=lambda e: (e.radius > 0, e.cost_ms, e.created_s)
        )
        self.cache.load([entry.id for entry in best], room)

    def _keep_house(self) -> None:
        """Forget expired sessions: their memory is given back though nobody asks for it; tell how
        full everything is; and leave to the system what is free."""
        given_back_s = time.monotonic()
        while True:
            try:
                self.sessions.collect()
                self._vitals.report()
            except TierUnavailable as error:
                _log.warning("expired sessions cannot be collected: %s", error)
            if time.monotonic() - given_back_s > _GIVE_BACK_S:
                give_back()
                given_back_s = time.monotonic()
            if self._closed.wait(min(_HOUSEKEEPING_S, self.options.session_ttl_s / 4)):
                return

    def _session_limits(self, config: CacheConfig, options: ServeOptions) -> SessionLimits:
        """The stated number of sessions: what memory can hold, or what the settings say."""
        spec = self.model.spec
        tokens, made = self._warm_up()
        frame_bytes = max(tokens.nbytes, 3 * spec.frame_px[0] * spec.frame_px[1])
        limits = SessionLimits(
            ttl_s=options.session_ttl_s,
            displace_s=options.session_displace_s,
            most=options.max_sessions or 1,
            history=options.history_frames,
            window=spec.window,
        )
        fit = capacity(config.hot.size_bytes, frame_bytes, made.nbytes, limits)
        if fit < max(1, options.max_sessions):
            raise ConfigError(
                f"hot_size_bytes of {config.hot.size_bytes} holds {fit} sessions of "
                f"{options.history_frames} frames, max_sessions asks for "
                f"{options.max_sessions or 'at least 1'}: enlarge it or lower max_sessions"
            )
        if options.max_sessions:
            return limits
        return replace(limits, most=fit)

    def _warm_up(self) -> tuple[Float, Float]:
        """Tokens and slice of one black frame, for their sizes; the first use is a slow one."""
        spec = self.model.spec
        [tokens] = self.model.embed(np.zeros((1, *spec.frame_px, 3), np.uint8))
        conditioning, _ = self.model.condition("", "")
        control = np.zeros((1, spec.control_dim), np.float32)
        out = self.model.absorb(self.model.assemble((), 0), tokens[None], control, conditioning)
        return tokens, out.slices[0]


def _trust(weights: Path, digest: str) -> TrustModel | None:
    """The calibration beside the weights; without one, no approximate answer is ever given."""
    try:
        return TrustModel.load(trust_path(weights), digest)
    except CalibrationError as error:
        _log.warning("only exact answers will be given: %s", error)
        return None


def _migration(name: str, weights: Path, digest: str) -> Migration:
    if name == "jacobian":
        return Jacobian()
    if name == "reuse":
        return Reuse()
    try:
        adapter = Adapter.load(weights / _ADAPTER, digest)
    except CalibrationError as error:
        raise ConfigError(f"trust_migration {name!r}: {error}") from error
    return adapter if name == "adapter" else BestOf(adapter)


def _warm(config: CacheConfig, on_event: Sink) -> WarmTier | None:
    warm = config.warm
    if warm.dir is None:
        return None
    return WarmTier(
        warm.dir,
        warm.index_directory,
        limit_bytes=warm.size_bytes,
        segment_bytes=warm.segment_bytes,
        durable=warm.durable,
        policy=warm.eviction,
        index_bytes=warm.index_bytes,
        on_event=on_event,
    )


def _go_on() -> None:
    return None


def _threads_of_environment() -> int | None:
    """What the launcher has found right for this number of instances."""
    text = os.environ.get("OMP_NUM_THREADS", "")
    return int(text) if text.isdigit() and int(text) > 0 else None
