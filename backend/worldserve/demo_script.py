"""What the demo does with a clip: a person who looks, drags, corrects, jumps and goes back."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["HORIZON", "Interaction", "Scene", "load_scene", "script"]

Controls = NDArray[np.float32]
Pixels = NDArray[np.uint8]

HORIZON = 8


@dataclass(frozen=True, eq=False)
class Scene:
    """A shipped clip: frames (T, h, w, 3), controls (T - 1, 4); `present`: last frame shown."""

    name: str
    prompt: str
    frames: Pixels
    controls: Controls
    present: int


@dataclass(frozen=True, eq=False)
class Interaction:
    """One request. samples (K, 4), oldest first; frames: new observations.

    seek: index in the session's history to go back to. truth: where the clip's recorded controls
    are replayed, the clip's frame that the first predicted one should look like. keep: whether a
    picture is made of the answer.
    """

    kind: str
    samples: Controls
    mode: str = "probe"
    frames: Pixels | None = None
    seek: int | None = None
    truth: int | None = None
    keep: bool = False

    @property
    def parameters(self) -> dict[str, Any]:
        given: dict[str, Any] = {"mode": self.mode}
        return given if self.seek is None else {**given, "frame": self.seek}


def load_scene(path: Path, present: int) -> Scene:
    """A clip as `worldserve.data.export` wrote it."""
    with np.load(path) as clip:
        return Scene(path.stem, str(clip["prompt"]), clip["frames"], clip["controls"], present)


def script(scene: Scene, dream: int = 2) -> list[Interaction]:
    """Some twenty interactions; `dream`: how many stretches of HORIZON frames end it."""
    frames, controls, p = scene.frames, scene.controls, scene.present
    if p + 2 + dream * HORIZON >= len(frames) or p < 1:
        raise ValueError(f"present {p} leaves no room in a clip of {len(frames)} frames")
    start = np.clip(controls[p], -0.8, 0.8)
    inward = -np.sign(start + 1e-6)  # so that the whole drag stays within [-1, 1]
    glide = np.array([0.04, 0.03, 0, 0], np.float32) * inward  # 0.05 a step
    drag = [start + k * glide for k in range(1, 6)]
    corrections = [
        drag[-1] + np.array(offset, np.float32)
        for offset in ((0.015, 0, 0, 0), (0.015, -0.01, 0.01, 0), (0.02, 0.01, 0, 0))
    ]
    jump = np.array([*(0.7 * inward[:3]), start[3]], np.float32)

    steps = [
        # The observed frames with the controls between them, and the first question.
        Interaction("open", _rows(*controls[:p], start), frames=frames[: p + 1]),
        *(Interaction("drag", _rows(c), keep=c is drag[-1]) for c in drag),
        *(Interaction("correct", _rows(c)) for c in corrections),
        Interaction("jump", _rows(jump), keep=True),
        Interaction("repeat", _rows(drag[2])),
        Interaction("repeat", _rows(jump)),
        Interaction("replay", controls[p : p + HORIZON], truth=p + 1, keep=True),
        # One frame on by the model's own prediction, one more by the camera.
        Interaction("advance", _rows(controls[p]), mode="advance", truth=p + 1),
        Interaction("observe", controls[p + 1 : p + 3], frames=frames[p + 2 : p + 3], truth=p + 3),
        *(Interaction("drag", _rows(controls[p + 2] * 0.8 + k * glide)) for k in range(3)),
        Interaction("scrub", _rows(drag[1]), mode="seek", seek=p),
        Interaction("correct", _rows(drag[1] + np.array((0.01, 0.01, 0, 0), np.float32))),
        Interaction("repeat", _rows(corrections[0])),
    ]
    for begin in range(p, p + dream * HORIZON, HORIZON):
        recorded = controls[begin : begin + HORIZON]
        steps.append(Interaction("advance", recorded, "advance", truth=begin + 1, keep=True))
    return steps


def _rows(*controls: Controls) -> Controls:
    return np.stack(controls).astype(np.float32)
