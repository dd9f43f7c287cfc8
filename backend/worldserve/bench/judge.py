"""How good an answer was: against the uncached one of the same question, and against the truth."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from ctrlcache.scores import relative_error
from worldserve.bench.workload import Controls, Pixels
from worldserve.sequence_client import Reply

__all__ = ["Judgement", "contradiction", "from_truth", "judge", "psnr_db", "ssim"]

_GRIPPER, _OBJECT, _FLAGS = slice(0, 3), slice(4, 7), slice(7, 9)
#: Two answers contradict each other where a moved object is this far from itself.
_APART_M = 0.02


@dataclass(frozen=True)
class Judgement:
    """Of one answer. error: relative state error against the uncached answer, as bounds state it.

    gripper_cm, object_cm: of the last predicted frame, from the uncached answer's. psnr_db, ssim:
    of all predicted frames against the uncached ones; the worst frame's PSNR, infinite where equal.
    """

    error: float
    gripper_cm: float
    object_cm: float
    psnr_db: float
    ssim: float


def judge(reply: Reply, uncached: Reply, scale: Controls) -> Judgement:
    """scale (S,): the model's `state_scale`."""
    return Judgement(
        error=float(relative_error(reply.states, uncached.states, scale)),
        gripper_cm=_apart_cm(reply.physics, uncached.physics, _GRIPPER),
        object_cm=_apart_cm(reply.physics, uncached.physics, _OBJECT),
        psnr_db=psnr_db(reply.frames, uncached.frames),
        ssim=ssim(reply.frames, uncached.frames),
    )


def from_truth(reply: Reply, truth: Controls) -> dict[str, float]:
    """Distances (cm) of the last predicted frame's gripper and object from the simulator's (P,)."""
    return {
        "gripper_off_cm": _apart_cm(reply.physics, truth[None], _GRIPPER),
        "object_off_cm": _apart_cm(reply.physics, truth[None], _OBJECT),
    }


def _apart_cm(physics: Controls, other: Controls, part: slice) -> float:
    return 100 * float(np.linalg.norm(physics[-1, part] - other[-1, part]))


def psnr_db(frames: Pixels, other: Pixels) -> float:
    """The worst frame's; frames (T, h, w, 3)."""
    squares = (frames.astype(np.float32) - other.astype(np.float32)) ** 2
    worst = float(squares.mean(axis=(1, 2, 3)).max())
    return math.inf if worst == 0 else 10 * math.log10(255**2 / worst)


def ssim(frames: Pixels, other: Pixels) -> float:
    """Mean structural similarity of luma, windows of 7 x 7 (Wang et al., 2004)."""
    luma = torch.tensor([0.299, 0.587, 0.114])
    a, b = ((torch.from_numpy(x.astype(np.float32)) @ luma)[:, None] / 255 for x in (frames, other))

    def mean(x: torch.Tensor) -> torch.Tensor:
        return F.avg_pool2d(x, 7, 1)

    mean_a, mean_b = mean(a), mean(b)
    var_a, var_b = mean(a * a) - mean_a**2, mean(b * b) - mean_b**2
    together = mean(a * b) - mean_a * mean_b
    c1, c2 = 0.01**2, 0.03**2
    value = (2 * mean_a * mean_b + c1) * (2 * together + c2)
    value = value / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))
    return float(value.mean())


def contradiction(physics: Controls, earlier: Controls) -> bool:
    """Whether two answers (H, P) to the same question, within a cell of control, disagree on a
    fact: whether something is held, whether it succeeded, or where the object ends up."""
    here, there = physics[-1], earlier[-1]
    sure = np.abs(here[_FLAGS] - 0.5) > 0.25
    sure &= np.abs(there[_FLAGS] - 0.5) > 0.25
    flipped = bool(np.any(sure & ((here[_FLAGS] > 0.5) != (there[_FLAGS] > 0.5))))
    return flipped or bool(np.linalg.norm(here[_OBJECT] - there[_OBJECT]) > _APART_M)
