"""How well, and how fast, predictions are carried over to another camera."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import numpy as np
from rich.progress import track

from worldserve.data.dataset import Clip
from worldserve.models.protocol import CarriesOver, WorldModel
from worldserve.training.evaluate import STEPS, psnr, roll_out

__all__ = ["further_view"]


def further_view(
    model: WorldModel,
    pairs: Iterable[tuple[Clip, Clip]],
    context: int = 32,
    starts: tuple[int, ...] = (40, 80),
) -> dict[str, Any]:
    """Frames of the second camera from the first one's rollout, beside a rollout of its own.

    pairs: the same clip from two cameras.

    Mean PSNR in dB at each of `STEPS`: carried over, by its own rollout on its own context, and the
    last frame held. Seconds of one context: of the first view (encode the context, roll out,
    generate; `warm`: the last frame only, the rest being known), and of the further view.
    """
    if not isinstance(model, CarriesOver):
        raise ValueError(f"model {model.spec.name!r} does not carry predictions over")
    quality: list[list[list[float]]] = []
    seconds: list[tuple[float, float, float]] = []
    steps = [s - 1 for s in STEPS]
    for here, there in track(list(pairs), description="further view"):
        conditioning, _ = model.condition("", here.view)
        other, _ = model.condition("", there.view)
        for start in starts:
            last = there.frames[start - 1]
            clock = [time.perf_counter()]
            out, present = roll_out(model, here, start, context, conditioning)
            clock.append(time.perf_counter())
            model.generate([here.frames[start - 1]], [out.tokens], [0])
            clock.append(time.perf_counter())
            seen = model.embed(last[None])[0]
            tokens = model.carry_over(out, present, seen, there.view)
            [carried] = model.generate([last], [tokens], [0])
            clock.append(time.perf_counter())
            roll_out(model, here, start, 1, conditioning)
            clock.append(time.perf_counter())
            alone, _ = roll_out(model, there, start, context, other)
            [own] = model.generate([last], [alone.tokens], [0])
            true = there.frames[start : start + STEPS[-1]]
            quality.append([[psnr(f[s], true[s]) for s in steps] for f in (carried, own)])
            quality[-1].append([psnr(last, true[s]) for s in steps])
            cold, generated, further, warm = np.diff(clock)
            seconds.append((cold + generated, warm + generated, further))
    mean = np.mean(quality, 0)
    cold_s, warm_s, further_s = np.median(seconds, 0)
    return {
        "contexts": len(quality),
        "steps": list(STEPS),
        "psnr_carried_db": _rounded(mean[0]),
        "psnr_own_db": _rounded(mean[1]),
        "psnr_copy_db": _rounded(mean[2]),
        "first_view_ms": round(1000 * float(cold_s), 1),
        "first_view_warm_ms": round(1000 * float(warm_s), 1),
        "further_view_ms": round(1000 * float(further_s), 1),
    }


def _rounded(values: np.ndarray[Any, Any]) -> list[float]:
    return [round(float(v), 3) for v in values]
