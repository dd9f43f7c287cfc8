"""Warming up: what sessions like the one that is announced needed is there before it begins.

The first request of a session is kept as a *recipe*, beside the warm directory. Told a prompt (the
request parameter mode=warm, or the setting `warm_prompts`), the recipes that mean the same are
rehearsed in thinking time: what the cache has of them is loaded, what it lacks is computed, under
the recipe's prompt and under the announced one. All of it is exact and named by content, so that a
warm-up changes how long an answer takes and never what it is.
"""

from __future__ import annotations

import io
import logging
import os
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ctrlcache.config import CacheConfig
from ctrlcache.couplet import Couplet
from ctrlcache.errors import CtrlCacheError, InvalidInput
from ctrlcache.events import Sink, Warmed, ignore
from ctrlcache.key import couplet_id, digest
from worldcache.endpoint import LanguageModel, LanguageModelConfig
from worldcache.prompts import Parser, sentences
from worldcache.warmup import Choice, Recipe, WarmupConfig, choose
from worldserve.background import Background, Urgency
from worldserve.cold import TaskTemplates
from worldserve.engine import Answer, Reply, Thinker
from worldserve.models.protocol import Checkpoint, RolloutInput
from worldserve.opening import Opener, Turn, provenance_of
from worldserve.options import ServeOptions
from worldserve.recall import Made, Present
from worldserve.rendering import draw
from worldserve.request import RawRequest, Request
from worldserve.scoring import Bench

__all__ = ["Recipes", "Warmth", "open_warmth", "prime"]

_log = logging.getLogger(__name__)
_MOST = 256
_SUFFIX = ".recipe.npz"
_TEXTS = ("prompt", "view", "device", "tenant")
_ARRAYS = ("samples", "frames", "sample_times", "frame_times")


class Recipes:
    """First requests of sessions, one file each; the oldest of more than `most` go. provenance: of
    the model; other models' are not seen. Safe in several threads and processes."""

    def __init__(self, directory: Path, provenance: bytes, most: int = _MOST) -> None:
        self._directory = directory
        self._mark = provenance.hex()[:12]
        self._most = most

    def add(self, request: Request, context: bytes) -> None:
        """context: where the request led, which names it. A file that cannot be written is a
        warm-up lost, nothing more."""
        name = digest(context, (request.prompt or "").encode()).hex()[:24]
        path = self._directory / f"{self._mark}-{name}{_SUFFIX}"
        try:
            if path.exists():
                os.utime(path)
                return
            self._directory.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(f".{os.getpid()}.part")
            part.write_bytes(_encode(request))
            part.replace(path)
            for old in self._files()[self._most :]:
                old.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("no recipe is kept: %s", error)

    def of(self, tenant: str) -> list[Recipe[Request]]:
        """The tenant's, newest first; damaged files are passed over and deleted."""
        found = []
        for path in self._files():
            try:
                request = _decode(path.read_bytes())
                if request.tenant == tenant:
                    used_s = path.stat().st_mtime
                    found.append(Recipe(request.prompt or "", used_s, request))
            except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
                _log.warning("recipe %s is damaged: %s", path.name, error)
                path.unlink(missing_ok=True)
        return found

    def _files(self) -> list[Path]:
        """Newest first."""
        aged = []
        for path in self._directory.glob(f"{self._mark}-*{_SUFFIX}"):
            try:
                aged.append((path.stat().st_mtime, path))
            except OSError:
                continue  # another process has just deleted it
        return [path for _, path in sorted(aged, reverse=True)]


def _encode(request: Request) -> bytes:
    texts = {name: np.array(getattr(request, name) or "") for name in _TEXTS}
    numbers = np.array([request.horizon, request.seed])
    arrays = {name: array for name in _ARRAYS if (array := getattr(request, name)) is not None}
    target = io.BytesIO()
    np.savez_compressed(target, numbers=numbers, **texts, **arrays)
    return target.getvalue()


def _decode(data: bytes) -> Request:
    with np.load(io.BytesIO(data), allow_pickle=False) as stored:
        arrays: dict[str, Any] = {name: stored[name] for name in _ARRAYS if name in stored}
        texts: dict[str, Any] = {name: str(stored[name]) for name in _TEXTS}
        horizon, seed = (int(n) for n in stored["numbers"])
    return Request("warm-up", horizon=horizon, seed=seed, start=True, **texts, **arrays)


@dataclass(frozen=True)
class _Parts:
    """What rehearsing needs of a service."""

    bench: Bench
    opener: Opener
    background: Background
    templates: TaskTemplates
    parser: Callable[[], Parser]


class Warmth:
    """recipes: None keeps and knows none. parser: made when it is first needed."""

    def __init__(
        self,
        config: WarmupConfig,
        recipes: Recipes | None,
        bench: Bench,
        opener: Opener,
        background: Background,
        templates: TaskTemplates,
        parser: Callable[[], Parser],
        on_event: Sink = ignore,
    ) -> None:
        self._config = config
        self._recipes = recipes
        self._parts = _Parts(bench, opener, background, templates, parser)
        self._parser: Parser | None = None
        self._on_event = on_event

    def watching(self, thinker: Thinker) -> Thinker:
        """The thinker, with first requests kept as recipes."""
        return thinker if self._recipes is None else _Watching(thinker, self._keep)

    def _keep(self, turn: Turn) -> None:
        recipes, request = self._recipes, turn.request
        if recipes is None or request.cache != "on":
            return
        # KEEP goes before a warm-up that is asked for in the same moment, and is never dropped.
        self._parts.background.submit(
            Urgency.KEEP, lambda _: recipes.add(request, turn.here.context)
        )

    def ask(self, prompt: str, tenant: str, done: Callable[[float | Exception], None]) -> None:
        """Warm up in thinking time; `done` gets the similarity of the best recipe, or the error."""

        def work(checkpoint: Checkpoint) -> None:
            try:
                done(self.warm(prompt, tenant, checkpoint).similarity)
            except Exception as error:
                done(error)

        self._parts.background.submit(Urgency.COMMIT, work)

    def answer(self, raw: RawRequest, deliver: Callable[[Reply | Exception], None]) -> None:
        """A request of mode `warm`: its reply, when all is done, is CONFIDENCE, the similarity."""
        try:
            texts = parse_warm(raw.parameters)
        except InvalidInput as error:
            deliver(error)
            return

        def done(result: float | Exception) -> None:
            if isinstance(result, Exception):
                deliver(result)
            else:
                deliver(Reply({"CONFIDENCE": np.array([result], np.float32)}))

        self.ask(texts[0], texts[1], done)

    def warm(self, prompt: str, tenant: str, checkpoint: Checkpoint) -> Choice[Request]:
        """Warm up now; what was chosen."""
        if self._config.prefetch_strategy == "none":
            return Choice((), "none", 0.0)
        if self._parser is None:
            self._parser = self._parts.parser()
        for action in self._parser.actions(prompt):
            self._parts.templates.missed(action.operation, action.similarity)
        known = [] if self._recipes is None else self._recipes.of(tenant)
        choice = choose(prompt, known, self._parser.embed, self._config)
        for recipe in choice.recipes:
            texts = [recipe.prompt]
            if choice.how == "semantic" and prompt != recipe.prompt:
                texts.append(prompt)
            for text in texts:
                checkpoint()
                try:
                    self._rehearse(replace(recipe.needs, prompt=text), checkpoint)
                    self._on_event(Warmed(choice.how))
                except CtrlCacheError as error:
                    _log.warning("a recipe cannot be rehearsed: %s", error)
        return choice

    def _rehearse(self, request: Request, checkpoint: Checkpoint) -> None:
        """Have at hand all that the request needs, its answer included; no session comes of it."""
        bench = self._parts.bench
        turn = self._parts.opener.open(request)
        present, made = bench.recall.present(
            turn.here, turn.conditioning, turn.fresh, checkpoint=checkpoint
        )
        bench.keep(made)
        known = bench.keeper.fetch(couplet_id(turn.space, turn.plan), ("frames",))
        if known is None or known.frames is None:
            bench.keeper.admit(self._answer(turn, present, checkpoint))

    def _answer(self, turn: Turn, present: Present, checkpoint: Checkpoint) -> Couplet:
        model, request = self._parts.bench.model, turn.request
        leaving = RolloutInput(present.memory, present.tokens, turn.plan, turn.conditioning)
        began = time.perf_counter()
        [out] = model.rollout([leaving], checkpoint)
        cost_ms = (time.perf_counter() - began) * 1e3
        base = request.frames[-1]
        frames = draw(
            model, base, out.tokens, request.seed, request.rendering, turn.plan, checkpoint
        )
        return Couplet(
            space=turn.space,
            plan=turn.plan,
            states=out.states,
            tokens=out.tokens,
            slice=out.slice,
            frames=frames,
            cost_ms=cost_ms,
            created_s=time.time(),
            lineage="warm-up",
        )


def open_warmth(
    options: ServeOptions,
    config: CacheConfig,
    bench: Bench,
    opener: Opener,
    background: Background,
    templates: TaskTemplates,
    on_event: Sink,
) -> Warmth:
    """As the settings say; recipes are kept where there is a warm directory."""
    settings = WarmupConfig(
        options.prefetch_strategy,
        options.warmup_steps,
        options.adaptive_threshold,
        options.fallback_policy,
    )
    ask = None
    if options.language_model_url:
        key_file = options.language_model_key_file
        ask = LanguageModel(
            LanguageModelConfig(
                options.language_model_url,
                options.language_model,
                Path(key_file) if key_file else None,
            )
        )
    spec, warm = bench.model.spec, config.warm.dir
    recipes = None
    if warm is not None:
        recipes = Recipes(warm.with_name(warm.name + "-recipes"), provenance_of(spec).digest)
    return Warmth(
        settings,
        recipes,
        bench,
        opener,
        background,
        templates,
        lambda: Parser(sentences(), spec.operations, ask),
        on_event,
    )


def parse_warm(parameters: Mapping[str, Any]) -> tuple[str, str]:
    """(prompt, tenant) of a request of mode `warm`; InvalidInput for what is no text."""
    texts = []
    for name, most in (("prompt", 2_000), ("tenant", 64)):
        value = parameters.get(name, "")
        if not isinstance(value, str) or len(value) > most:
            raise InvalidInput(
                f"parameter {name!r} must be a text of at most {most}, got {value!r}"
            )
        texts.append(value)
    return texts[0], texts[1]


class _Watching:
    """A `Thinker` that notes where sessions begin."""

    def __init__(self, inner: Thinker, keep: Callable[[Turn], None]) -> None:
        self._inner = inner
        self._keep = keep

    def answered(
        self, turn: Turn, answer: Answer | None, present: Present | None, made: list[Made]
    ) -> None:
        self._inner.answered(turn, answer, present, made)
        if (
            turn.old is None
            and turn.taken is None
            and answer is not None
            and turn.request.frames.size
        ):
            self._keep(turn)


def prime(bench: Bench, steps: int, horizon: int, prompts: Sequence[str] = ()) -> None:
    """Run the model `steps` frames ahead on a black picture: what a first use costs (memory,
    kernels that are chosen by shape) is paid before the first request."""
    if steps <= 0:
        return
    model, spec = bench.model, bench.model.spec
    black = np.zeros((1, *spec.frame_px, 3), np.uint8)
    conditioning, _ = model.condition(next(iter(prompts), ""), "")
    tokens = model.embed(black)[0]
    control = np.zeros((1, spec.control_dim), np.float32)
    memory = model.absorb(model.assemble((), 0), tokens[None], control, conditioning).memory
    plan = control.repeat(min(horizon, spec.max_horizon), 0)
    for _ in range(-(-steps // len(plan))):
        [out] = model.rollout([RolloutInput(memory, tokens, plan, conditioning)])
        model.generate([black[0]], [out.tokens], [0])
