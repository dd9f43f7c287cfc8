"""Calibrations of step reuse: kept beside the weights, and failing closed."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from ctrlcache.errors import CalibrationError
from worldcache.content import Rung
from worldcache.fitting import fit_slopes, fit_table, rmse_levels
from worldcache.reuse_calibration import (
    POLICIES,
    Knob,
    ReuseCalibration,
    StepTable,
    peak_quantile,
    quality_db,
)
from worldcache.running import Reuse
from worldcache.weights import WeightSettings

TABLE = StepTable(
    knobs={"easycache": (Knob(0.1, 45.0, 50.0, 0.3), Knob(0.4, 33.0, 40.0, 0.6))},
    ladder=(Rung((0, 7), 1.5, 0.2), Rung((0, 1, 7), 0.4)),
    slopes={(0, 1, 2): 0.25},
)


def calibration(**changes):
    known = {
        "weights_digest": "abc",
        "tables": {8: TABLE},
        "settings": WeightSettings(0.6, 3, 0.5),
        "change": np.full((3, 2, 2), 0.25, np.float32),
        "cases": 7,
        "created": "2026-01-01",
    }
    return ReuseCalibration(**{**known, **changes})


def test_what_is_saved_comes_back(tmp_path):
    calibration().save(tmp_path / "reuse.json")
    back = ReuseCalibration.load(tmp_path / "reuse.json", "abc")
    assert back.tables[8] == TABLE or vars(back.tables[8]) == vars(TABLE)
    assert back.settings == WeightSettings(0.6, 3, 0.5)
    assert np.array_equal(back.change, calibration().change)
    assert back.digest == calibration().digest
    assert list(tmp_path.iterdir()) == [tmp_path / "reuse.json"]


def test_other_decisions_have_another_digest():
    other = StepTable(TABLE.knobs, TABLE.ladder, {(0, 1, 2): 0.26})
    assert calibration(tables={8: other}).digest != calibration().digest


@pytest.mark.parametrize("name", POLICIES)
def test_without_calibration_everything_is_computed(name):
    """No table, other steps, or a budget nobody ever kept: the policy is `none`."""
    assert ReuseCalibration("abc", {}).policy(name, 8, 30).name == "none"
    assert calibration().policy(name, 9, 30).name == "none"
    if name not in ("none", "content"):
        assert calibration().policy(name, 8, 46).name == "none"


def test_the_knob_that_skips_most_and_keeps_the_budget_is_taken():
    assert calibration().policy("easycache", 8, 33).threshold == 0.4
    assert calibration().policy("easycache", 8, 33.1).threshold == 0.1
    with pytest.raises(ValueError, match="one of"):
        calibration().policy("magic", 8, 33)


@pytest.mark.parametrize(
    "damage",
    [
        lambda raw: raw.update(format=2),
        lambda raw: raw.pop("tables"),
        lambda raw: raw["tables"]["8"]["ladder"][0].update(factor=math.nan),
        lambda raw: raw["tables"]["8"].update(reuses="everything"),
        lambda raw: raw["settings"].update(sensitivity=2),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, damage):
    path = tmp_path / "reuse.json"
    calibration().save(path)
    raw = json.loads(path.read_text())
    damage(raw)
    path.write_text(json.dumps(raw))
    with pytest.raises(CalibrationError):
        ReuseCalibration.load(path, "abc")


def test_other_weights_are_refused(tmp_path):
    path = tmp_path / "reuse.json"
    calibration().save(path)
    with pytest.raises(CalibrationError, match="calibrate reuse"):
        ReuseCalibration.load(path, "abd")
    with pytest.raises(CalibrationError, match="there is no"):
        ReuseCalibration.load(tmp_path / "other.json", "abc")


def test_errors_and_decibels():
    assert quality_db(0.1) == pytest.approx(20)
    kept, mean = peak_quantile(np.array([1.0] * 19 + [10.0]), 0.05)
    assert kept == pytest.approx(28.13, abs=0.01)  # the worst of twenty
    assert kept < mean < 48.2


@dataclass
class Drawn:
    frames: np.ndarray
    skipped: float
    activity: np.ndarray


class Bends:
    """A flow in one dimension whose output bends with the step, by as much as its activity."""

    steps = 6

    def __init__(self, cases):
        self.bend = np.random.default_rng(0).uniform(1, 10, (cases, 4))

    def output(self, case, step):
        return torch.from_numpy(self.bend[case] * (1 - 0.5**step))[:, None]

    def outputs(self, case, reuses):
        return [self.output(case, step) for step in range(self.steps)]

    def run(self, case, policy):
        reuse, total = Reuse(policy, 4, self.steps), 0
        for step in range(self.steps):
            rows = reuse.rows(step, torch.zeros(4, 1))
            reuse.tally.total += 4
            reuse.tally.computed += len(rows)
            total = total + reuse.fill(self.output(case, step)[rows] if rows else None)
            if step == 0:
                reuse.weigh(self.bend[case])
        return Drawn(total.numpy(), reuse.tally.skipped, self.bend[case])


def test_slopes_are_found_by_least_squares():
    """From outputs 1 - 2^-k, the third is half as far from the second as that from the first."""
    assert fit_slopes(Bends(3), 3)[0, 1, 2] == pytest.approx(0.5)


def test_a_fitted_budget_is_kept_on_other_cases():
    """`content` calibrated on some cases keeps its budget on all but a share of others'."""
    subject = Bends(60)
    table = fit_table(subject, 30, policies=("easycache",), delta=0.1)
    assert table.ladder
    assert len(table.knobs["easycache"]) > 3
    fitted = ReuseCalibration("abc", {6: table})
    for budget in (20, 30, 40):
        policy = fitted.policy("content", 6, budget)
        missed, skipped = [], []
        for case in range(30, 60):
            truth, made = subject.run(case, fitted.policy("none", 6, 0)), subject.run(case, policy)
            bound = 255 / 10 ** (budget / 20)
            missed.append(rmse_levels(made.frames, truth.frames) > bound)
            skipped.append(made.skipped)
        assert np.mean(missed) <= 0.2
        assert np.mean(skipped) > 0
