"""Long generations from a prompt of several phrases, made again only where an edit has reached.

A storyboard is a list of segments. A segment has a phrase, which conditions it, and the controls
that are held through it; it begins from an *anchor* (frames that were really seen) or goes on from
where the one before it ended. It is computed in chunks of at most the model's horizon. What was
observed is absorbed without a phrase, so that changing one does not touch the context.

What an edit reaches: a phrase or a control, the chunks of its segment from there on and the
segments that go on from it; an anchor, its segment and those that go on from it. All else is found
as it was made (`worldcache.editing`), and the result is bit for bit that of making everything anew.

A *repaint* changes part of an anchor's picture. Exact, it is an edit of that anchor. Not exact, the
scene's motion stays as it is (tokens and states are reused) and the frames of the segment are drawn
anew from the repainted picture inside the box, feathered by `MARGIN_PX`; outside of that they are,
bit for bit, the frames from before. `benchmarks/editing.py` measures how far that is from exact.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ctrlcache.errors import InvalidInput
from ctrlcache.key import canonical_control
from worldcache.editing import Features, Memo, Report, content
from worldserve.models.protocol import Float, Pixels, RolloutInput, WorldModel
from worldserve.opening import provenance_of

__all__ = ["MARGIN_PX", "Anchor", "Director", "Film", "Repaint", "Segment"]

#: How far outside of its box a repaint may change the picture.
MARGIN_PX = 4


@dataclass(frozen=True, eq=False)
class Repaint:
    """pixels (h, w, 3) at `top`, `left` of the anchor's last frame, in the model's frame size."""

    top: int
    left: int
    pixels: Pixels
    exact: bool = False


@dataclass(frozen=True, eq=False)
class Anchor:
    """frames (T, h, w, 3) of the model's size that were seen, oldest first; controls (T - 1, C)
    applied between them."""

    frames: Pixels
    controls: Float
    repaint: Repaint | None = None


@dataclass(frozen=True, eq=False)
class Segment:
    """controls (T, C), one for each frame to come. anchor: None goes on from the one before."""

    phrase: str
    controls: Float
    anchor: Anchor | None = None
    view: str = ""


@dataclass(frozen=True, eq=False)
class Film:
    """frames (T, h, w, 3) and states (T, S) of all segments; report: what was computed for it.
    exact: whether every frame is bit for bit what the model makes of the storyboard."""

    frames: Pixels
    states: Float
    report: Report
    exact: bool


@dataclass(eq=False)
class _Place:
    """Where a rollout may leave from. name: of all that led here. before: the place that `chunk`
    left from; None where an anchor ends. memory: where it is at hand."""

    name: bytes
    position: int
    anchor: Anchor
    before: _Place | None = None
    chunk: _Chunk | None = None
    memory: Any = None


@dataclass(frozen=True, eq=False)
class _Chunk:
    """One rollout: its name, conditioning, and controls (H, C)."""

    name: bytes
    conditioning: Any
    controls: Float


class Director:
    """Makes films of storyboards, and again after an edit. One thread at a time.

    features: where everything is kept that a later edit may reuse. tenant: whose it is.
    """

    def __init__(self, model: WorldModel, features: Features, tenant: str = "") -> None:
        self._model = model
        self._memo = Memo(features, provenance_of(model.spec, tenant).digest)
        self._horizon = max(1, model.spec.max_horizon // 2)

    def make(self, segments: Sequence[Segment], seed: int = 0) -> Film:
        """The film of a storyboard. InvalidInput names what is wrong with it."""
        _check(segments, self._model.spec.control_dim, self._model.spec.frame_px)
        self._memo.begin()
        frames, states = [], []
        place: _Place | None = None
        for segment in segments:
            if segment.anchor is not None or place is None:
                place = self._enter(segment.anchor)
            conditioning, named = self._condition(segment)
            for first in range(0, len(segment.controls), self._horizon):
                controls = canonical_control(segment.controls[first : first + self._horizon])
                name = self._memo.name("chunk", place.name, named, controls.tobytes())
                chunk = _Chunk(name, conditioning, controls)
                place = _Place(name, place.position + len(controls), place.anchor, place, chunk)
                tokens, state = self._rolled(place)
                states.append(state)
                frames.append(self._drawn(place, tokens, seed))
        exact = all(s.anchor is None or _is_exact(s.anchor) for s in segments)
        return Film(np.concatenate(frames), np.concatenate(states), self._memo.report, exact)

    def _condition(self, segment: Segment) -> tuple[Any, bytes]:
        try:
            return self._model.condition(segment.phrase, segment.view)
        except ValueError as error:
            raise InvalidInput(
                f"phrase {segment.phrase!r}, view {segment.view!r}: {error}"
            ) from None

    # -- context --------------------------------------------------------------------------------

    def _enter(self, anchor: Anchor | None) -> _Place:
        """Where an anchor ends; nothing is computed before it is needed."""
        assert anchor is not None  # checked: the first segment has one
        shown = _picture(anchor, moving=True)
        controls = canonical_control(anchor.controls)
        name = self._memo.name("anchor", content(shown), controls.tobytes())
        return _Place(name, len(shown) - 1, anchor)

    def _observed(self, anchor: Anchor) -> Float:
        """Tokens (T, N, D), each frame's by its own pixels: whoever shows the same shares them."""
        shown = _picture(anchor, moving=True)
        ids = [self._memo.name("tokens", content(frame)) for frame in shown]
        pixels = dict(zip(ids, shown, strict=True))

        def embed(missing: list[bytes]) -> dict[bytes, NDArray[Any]]:
            made = self._model.embed(np.stack([pixels[id] for id in missing]))
            return dict(zip(missing, made, strict=True))

        group = self._memo.name("scene", content(shown[0]))
        found = self._memo.get_all("tokens", dict.fromkeys(ids, group), embed)
        return np.stack([found[id] for id in ids])

    # -- rolling --------------------------------------------------------------------------------

    def _rolled(self, place: _Place) -> tuple[Float, Float]:
        """Tokens (H, N, D) and states (H, S) of the chunk that leads to `place`."""
        memo, chunk = self._memo, place.chunk
        assert chunk is not None  # only anchors have none
        assert place.before is not None
        ids = memo.name("rolled", chunk.name), memo.name("states", chunk.name)
        tokens, states = memo.known(ids[0], "rolled"), memo.known(ids[1], "states")
        if tokens is not None and states is not None:
            return tokens, states
        memory, present = self._memory(place.before), self._present(place.before)
        began = time.perf_counter()
        leaving = RolloutInput(memory, np.array(present), chunk.controls, chunk.conditioning)
        [out] = self._model.rollout([leaving])
        cost_ms = (time.perf_counter() - began) * 1e3
        memo.keep(ids[0], out.tokens, "rolled", cost_ms)
        memo.keep(ids[1], out.states, "states", cost_ms)
        return out.tokens, out.states

    def _present(self, place: _Place) -> Float:
        """Tokens (N, D) of the frame at a place."""
        tokens = self._observed(place.anchor) if place.chunk is None else self._rolled(place)[0]
        present: Float = tokens[-1]
        return present

    def _memory(self, place: _Place) -> Any:
        """What the model remembers of the frames before a place's."""
        if place.memory is not None:
            return place.memory
        wanted = self._model.spec.window - 1
        parts: list[Float] = []
        at: _Place | None = place
        while at is not None and sum(map(len, parts)) < wanted:
            parts.insert(0, self._slices(at))
            if place.memory is not None:
                break  # computing them has left the memory behind
            at = at.before
        if place.memory is None:
            newest = np.concatenate(parts)[-wanted:]
            place.memory = self._model.assemble(list(newest), place.position)
        if place.before is not None:
            place.before.memory = None  # it is large, and nothing leaves from there any more
        return place.memory

    def _slices(self, place: _Place) -> Float:
        """Of the frames that were left on the way to `place`: (T, ...), T = 0 for none."""
        kind = "slices"
        id = self._memo.name(kind, place.name)
        found = self._memo.known(id, kind)
        if found is not None:
            return found
        if place.chunk is None:
            tokens, controls = (
                self._observed(place.anchor),
                canonical_control(place.anchor.controls),
            )
            if len(tokens) == 1:
                return np.empty((0, 1), np.float32)
            memory, conditioning = self._model.assemble((), 0), self._model.condition("", "")[0]
        else:
            assert place.before is not None
            memory, conditioning = self._memory(place.before), place.chunk.conditioning
            rolled = self._rolled(place)[0]
            tokens = np.concatenate((self._present(place.before)[None], rolled))
            controls = place.chunk.controls
        began = time.perf_counter()
        out = self._model.absorb(memory, tokens[:-1], controls, conditioning)
        cost_ms = (time.perf_counter() - began) * 1e3
        place.memory = out.memory
        made = np.stack(out.slices)
        self._memo.keep(id, made, kind, cost_ms)
        return made

    # -- drawing --------------------------------------------------------------------------------

    def _drawn(self, place: _Place, tokens: Float, seed: int) -> Pixels:
        """Frames (H, h, w, 3) of the chunk that leads to `place`."""
        original = _picture(place.anchor, moving=True)[-1]
        frames = self._from(original, place, tokens, seed)
        repaint = place.anchor.repaint
        if repaint is None or repaint.exact:
            return frames
        new = self._from(_picture(place.anchor, moving=False)[-1], place, tokens, seed)
        weight = _feather(repaint, frames.shape[1:3])
        mixed = frames + weight * (new.astype(np.float32) - frames)
        out: Pixels = np.where(weight > 0, mixed.round().clip(0, 255), frames).astype(np.uint8)
        return out

    def _from(self, picture: Pixels, place: _Place, tokens: Float, seed: int) -> Pixels:
        def draw() -> Pixels:
            return self._model.generate([picture], [np.array(tokens)], [seed])[0]

        own = content(picture)
        id = self._memo.name("frames", place.name, own, b"%d" % seed)
        return self._memo.get("frames", id, draw, self._memo.name("camera", own))


def _picture(anchor: Anchor, moving: bool) -> Pixels:
    """The anchor's frames, repainted; where the scene moves as before, only if that is exact."""
    repaint = anchor.repaint
    if repaint is None or (moving and not repaint.exact):
        return anchor.frames
    frames = anchor.frames.copy()
    h, w = repaint.pixels.shape[:2]
    frames[-1, repaint.top : repaint.top + h, repaint.left : repaint.left + w] = repaint.pixels
    return frames


def _is_exact(anchor: Anchor) -> bool:
    return anchor.repaint is None or anchor.repaint.exact


def _feather(repaint: Repaint, shape: tuple[int, ...]) -> Float:
    """(h, w, 1): 1 inside the box, falling to 0 over MARGIN_PX around it."""
    h, w = repaint.pixels.shape[:2]
    axes = []
    for size, first, length in zip(shape, (repaint.top, repaint.left), (h, w), strict=True):
        at = np.arange(size)
        outside = np.maximum(first - at, at - (first + length - 1)).clip(0)
        axes.append((1 - outside / MARGIN_PX).clip(0, 1))
    weight: Float = np.outer(*axes)[..., None].astype(np.float32)
    return weight


def _check(segments: Sequence[Segment], control_dim: int, frame_px: tuple[int, int]) -> None:
    if not segments or segments[0].anchor is None:
        raise InvalidInput("a storyboard needs a segment, and its first one an anchor")
    for number, segment in enumerate(segments):
        _check_controls(f"segment {number}", segment.controls, control_dim)
        if not len(segment.controls):
            raise InvalidInput(f"segment {number}: expected at least one control, got none")
        anchor = segment.anchor
        if anchor is None:
            continue
        _check_controls(f"anchor of segment {number}", anchor.controls, control_dim)
        if anchor.frames.dtype != np.uint8 or anchor.frames.shape[1:] != (*frame_px, 3):
            raise InvalidInput(
                f"anchor of segment {number}: expected uint8 frames (T, {frame_px[0]}, "
                f"{frame_px[1]}, 3), got {anchor.frames.dtype} {anchor.frames.shape}"
            )
        if len(anchor.controls) != len(anchor.frames) - 1:
            raise InvalidInput(
                f"anchor of segment {number}: {len(anchor.frames)} frames need "
                f"{len(anchor.frames) - 1} controls between them, got {len(anchor.controls)}"
            )
        _check_repaint(number, anchor.repaint, frame_px)


def _check_controls(where: str, controls: Float, control_dim: int) -> None:
    if controls.ndim != 2 or controls.shape[1] != control_dim:
        raise InvalidInput(f"{where}: expected controls (T, {control_dim}), got {controls.shape}")


def _check_repaint(number: int, repaint: Repaint | None, frame_px: tuple[int, int]) -> None:
    if repaint is None:
        return
    pixels, (height, width) = repaint.pixels, frame_px
    inside = (
        pixels.dtype == np.uint8
        and pixels.ndim == 3
        and pixels.shape[2] == 3
        and pixels.size > 0
        and 0 <= repaint.top <= height - pixels.shape[0]
        and 0 <= repaint.left <= width - pixels.shape[1]
    )
    if not inside:
        raise InvalidInput(
            f"repaint of segment {number}: expected uint8 pixels (h, w, 3) inside {height} x "
            f"{width}, got {pixels.dtype} {pixels.shape} at {repaint.top}, {repaint.left}"
        )
