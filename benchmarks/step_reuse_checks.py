"""What else step_reuse.py looks at: drift, coherence, the analysers, the settings."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from worldcache.analyze import AnalyzeConfig, analyze
from worldcache.analyze_full import analyze_full
from worldcache.content import peak_db
from worldcache.fitting import LEAST_ACTIVITY, rmse_levels
from worldcache.policies import Always
from worldcache.reuse_calibration import ReuseCalibration
from worldcache.weights import WeightSettings
from worldserve.models import stepping
from worldserve.models.protocol import RolloutInput
from worldserve.models.reference import ReferenceWorldModel
from worldserve.reuse import clips_in

BUDGET_DB = 35.0


def rank_correlation(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Spearman's, ties by the mean of their ranks."""
    ranks = []
    for values in (a.ravel(), b.ravel()):
        _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
        ends = np.cumsum(counts)
        ranks.append((ends - (counts - 1) / 2)[place])
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def drift(
    model: ReferenceWorldModel, calibration: ReuseCalibration, data: Path, steps: int, chunks: int
) -> dict[str, Any]:
    """Chunks of two frames, each advanced from the predictions of the one before: PSNR to the true
    frames without reuse and with `content`, chunk by chunk; memories must be the same, bit for
    bit."""
    policies = {"none": Always(), "content": calibration.policy("content", steps, BUDGET_DB)}
    found: dict[str, list[list[float]]] = {name: [] for name in policies}
    identical = True
    for clip in list(clips_in(data))[:3]:
        context = 4
        count = min(chunks, (len(clip.frames) - context) // 2)
        conditioning, _ = model.condition(clip.prompt, clip.view)
        tokens = model.embed(clip.frames[:context])
        began = model.absorb(
            model.assemble((), 0), tokens[:-1], clip.controls[: context - 1], conditioning
        )
        ends = []
        for name, policy in policies.items():
            memory, present, row = began.memory, tokens[-1], []
            for chunk in range(count):
                first = context - 1 + 2 * chunk
                plan = np.asarray(clip.controls[first : first + 2], np.float32)
                [out] = model.rollout([RolloutInput(memory, present, plan, conditioning)])
                base = clip.frames[context - 1]
                frames, _ = model.draw(base, out.tokens, chunk, steps, policy, plan)
                truth = clip.frames[first + 1 : first + 3]
                row.append(peak_db(float(np.sqrt(np.square(rmse_levels(frames, truth)).mean()))))
                for control in plan:
                    after = model.absorb(memory, present[None], control[None], conditioning)
                    memory, present = after.memory, after.predicted_tokens
            found[name].append(row)
            ends.append(present)
        identical = identical and np.array_equal(ends[0], ends[1])
    shortest = min(len(row) for rows in found.values() for row in rows)
    means = {n: np.mean([row[:shortest] for row in rows], axis=0) for n, rows in found.items()}
    gap = means["content"] - means["none"]
    return {
        "chunks": shortest,
        "psnr_db": {name: np.round(values, 2).tolist() for name, values in means.items()},
        "gap_db_mean": float(gap.mean()),
        "gap_db_per_chunk": float(np.polyfit(np.arange(shortest), gap, 1)[0]),
        "memories_identical": bool(identical),
    }


def coherence(stage: Any) -> dict[str, float]:
    """Error between successive frames after warping one along the flow to the other, in grey
    levels; the flow is that of the frames without reuse."""
    import cv2

    policy = stage.calibration.policy("content", stage.subject.steps, BUDGET_DB)
    errors: dict[str, list[float]] = {"none": [], "content": []}
    for case, plain in enumerate(stage.plain):
        reused, _ = stage.subject.draw(case, policy)
        grey = [cv2.cvtColor(frame, cv2.COLOR_RGB2GRAY) for frame in plain]
        y, x = np.mgrid[: plain.shape[1], : plain.shape[2]].astype(np.float32)
        for at in range(len(plain) - 1):
            flow = cv2.calcOpticalFlowFarneback(
                grey[at], grey[at + 1], None, 0.5, 3, 9, 3, 5, 1.1, 0
            )
            for name, frames in (("none", plain), ("content", reused)):
                warped = cv2.remap(
                    frames[at + 1], x + flow[..., 0], y + flow[..., 1], cv2.INTER_LINEAR
                )
                errors[name].append(float(np.abs(warped.astype(float) - frames[at]).mean()))
    means = {name: float(np.mean(values)) for name, values in errors.items()}
    return {**means, "ratio": means["content"] / means["none"]}


def analysers(stage: Any, data: Path) -> dict[str, float]:
    """The fast against the full one on whole clips, and the share of a generation that weighing
    takes."""
    config = AnalyzeConfig()
    fast_s, full_s, correlations = 0.0, 0.0, []
    for clip in list(clips_in(data))[:6]:
        began = time.perf_counter()
        fast = analyze(clip.frames, config)
        fast_s += time.perf_counter() - began
        began = time.perf_counter()
        full = analyze_full(clip.frames, config)
        full_s += time.perf_counter() - began
        correlations.append(rank_correlation(fast.complexity, full.complexity))
    model, item = stage.subject.model, stage.subject.cases[0]
    last, tokens, _ = model.flow(item.frame, item.tokens, item.seed)
    end = last + 0.05 * torch.randn(last.shape)
    weighing, drawing = [], []
    for _ in range(5):
        began = time.perf_counter()
        stepping.weigh(last, end, tokens, stage.calibration.change, stage.calibration.settings)
        weighing.append(time.perf_counter() - began)
        began = time.perf_counter()
        stage.subject.draw(0, Always())
        drawing.append(time.perf_counter() - began)
    return {
        "times_faster": full_s / fast_s,
        "rank_correlation": float(np.mean(correlations)),
        "rank_correlation_lowest": float(np.min(correlations)),
        "share_of_generation": float(np.median(weighing) / np.median(drawing)),
    }


def settings_table(stage: Any) -> list[dict[str, float]]:
    """What each setting changes: how well activity ranks the true errors of frames, and what share
    of evaluations a budget then skips (bounds fitted anew on the even cases, used on the odd)."""
    steps, slopes = stage.subject.steps, stage.calibration.tables[stage.subject.steps]
    errors = {}
    for rung in slopes.ladder[:4]:
        policy = stage.calibration.tables[steps].alone(rung)
        errors[rung.steps] = [
            rmse_levels(stage.subject.draw(case, policy)[0], truth)
            for case, truth in enumerate(stage.plain)
        ]
    rows = []
    variants = [WeightSettings(sensitivity=s) for s in (0.0, 0.6, 0.7, 0.8)]
    variants += [WeightSettings(window=w) for w in (1, 4, 8)]
    variants += [WeightSettings(semantics=s) for s in (0.0, 0.6, 0.9)]
    for settings in variants:
        active = stage.subject.activities_with(settings)
        flat = np.concatenate(active)
        first = np.concatenate(next(iter(errors.values())))
        rows.append(
            {
                "sensitivity": settings.sensitivity,
                "window": settings.window,
                "semantics": settings.semantics,
                "rank_correlation_with_error": rank_correlation(flat, first),
                "skipped_at_35_db": _skipped(active, errors, steps),
            }
        )
    return rows


def _skipped(
    active: list[NDArray[np.float64]],
    errors: dict[tuple[int, ...], list[NDArray[np.float64]]],
    steps: int,
) -> float:
    even, odd = slice(0, None, 2), slice(1, None, 2)
    best = np.zeros(len(np.concatenate(active[odd])))
    for chosen, levels in errors.items():
        ratio = np.concatenate(levels[even]) / (np.concatenate(active[even]) + LEAST_ACTIVITY)
        bound = np.quantile(ratio, 0.95) * (np.concatenate(active[odd]) + LEAST_ACTIVITY)
        kept = 20 * np.log10(255 / bound) >= BUDGET_DB
        best = np.maximum(best, kept * (1 - len(chosen) / steps))
    return float(best.mean())
