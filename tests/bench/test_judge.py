"""How answers are judged, and how figures come from them."""

from __future__ import annotations

import io

import numpy as np
import pytest
from rich.console import Console
from rich.markdown import Markdown

from worldserve.bench.judge import contradiction, judge, psnr_db, ssim
from worldserve.bench.report import SuiteReport, markdown
from worldserve.bench.rivals import RIVALS
from worldserve.bench.scoreboard import Played, scaled_deadline_ms, score, speed_up
from worldserve.sequence_client import Reply


def reply(**changes) -> Reply:
    draw = np.random.default_rng(0)
    fields = {
        "latency_ms": 1.0,
        "frames": draw.integers(0, 256, (8, 16, 16, 3)).astype(np.uint8),
        "states": draw.normal(size=(8, 12)).astype(np.float32),
        "physics": np.full((8, 9), 0.1, np.float32),
        "tier": "none",
        "exact": True,
        "bound": 0.0,
        "stages_ms": np.zeros(6, np.float32),
    }
    return Reply(**{**fields, **changes})


def test_the_same_answer_has_no_fault():
    found = judge(reply(), reply(), np.ones(12, np.float32))
    assert (found.error, found.gripper_cm, found.object_cm) == (0, 0, 0)
    assert found.psnr_db == np.inf
    assert found.ssim == pytest.approx(1)


def test_centimetres_are_centimetres():
    moved = np.full((8, 9), 0.1, np.float32)
    moved[-1, 0] += 0.03
    moved[-1, 5] += 0.04
    found = judge(reply(physics=moved), reply(), np.ones(12, np.float32))
    assert found.gripper_cm == pytest.approx(3, rel=1e-4)
    assert found.object_cm == pytest.approx(4, rel=1e-4)


def test_psnr_is_the_worst_frames():
    frames = reply().frames.copy()
    frames[3] = np.where(frames[3] > 127, frames[3] - 10, frames[3] + 10)
    assert psnr_db(frames, reply().frames) == pytest.approx(20 * np.log10(255 / 10))
    assert ssim(frames, reply().frames) < 1


def test_contradictions_are_facts_not_shades():
    facts = np.full((8, 9), 0.1, np.float32)
    held = facts.copy()
    held[-1, 7] = 0.9
    assert contradiction(facts, held)
    unsure = facts.copy()
    unsure[-1, 7] = 0.6
    assert not contradiction(facts, unsure)
    moved = facts.copy()
    moved[-1, 4] += 0.03
    assert contradiction(facts, moved)
    moved[-1, 4] = facts[-1, 4] + 0.01
    assert not contradiction(facts, moved)


def answers(latencies, **changes):
    made = {
        "tier": "hot",
        "exact": False,
        "bound": 0.02,
        "error": 0.01,
        "operation_right": True,
        "gripper_cm": 0.0,
        "object_cm": 0.0,
        "psnr_db": 50.0,
        "ssim": 0.99,
        "contradicts": False,
    }
    return [{**made, "latency_ms": ms, **changes} for ms in latencies]


def played(name, *sessions):
    one = {"opening_ms": 40.0, "cpu_s": 1.0, "bytes": {"hot": 5.0}}
    return Played(name, [{"answers": rows, **one} for rows in sessions])


def test_a_score_counts_what_is_there():
    rows = [
        *answers([10.0] * 6),
        *answers([10.0] * 2, error=0.03),
        *answers([200.0] * 2, tier="none", exact=True, operation_right=False),
    ]
    found = score(played("trust", rows), 100, 150)
    assert found.hit_rate == pytest.approx(0.8)
    assert found.approximate == pytest.approx(0.8)
    assert found.over_bound == pytest.approx(2 / 8)
    assert found.misses == pytest.approx(0.2)
    assert found.operation_right == pytest.approx(0.8)
    assert (found.worst_ms, found.opening_ms) == (200, 40)


def test_reuse_between_steps_is_no_approximate_answer():
    """Frames that were drawn with reuse are judged, but no bound was stated for their states."""
    rows = answers([10.0] * 3, bound=0.0, error=0.0, tier="none", psnr_db=40.0)
    made = played("worldcache", [*rows, *answers([10.0], exact=True, psnr_db=np.inf)])
    made.sessions[0]["worldcache"] = {"blocks reused": 3.0, "blocks computed": 9.0}
    found = score(made, 100, 150)
    assert (found.approximate, found.over_bound, found.reusing) == (0, 0, 0.75)
    assert (found.psnr_db, found.blocks_reused, found.features_found) == (40, 0.25, None)


def test_tables_fit_a_terminal():
    """Eighty columns, also where figures and names are long."""
    name = max(RIVALS, key=len)
    slow = [1234.5, 99_999.9]
    sides = {"recompute": slow, "stateful": slow, name: [1.0, 1000.0]}
    rows = {
        key: played(key, answers(took, gripper_off_cm=12.345, object_off_cm=12.345))
        for key, took in sides.items()
    }
    for one in rows.values():
        one.sessions[0]["worldcache"] = {"lookups hit": 1.0, "blocks computed": 1.0}
    scores = {key: score(one, 100, 150) for key, one in rows.items()}
    text = markdown([SuiteReport("kitchen", "model", 2, 123.4, scores, rows)], {})
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert len(tables) > 20
    assert max(map(len, tables)) <= 80
    console = Console(width=80, file=io.StringIO())
    console.print(Markdown(text))
    shown = console.file.getvalue()
    assert "times faster than recompute, p50" in shown  # in one piece
    assert f"{scores[name].p99_ms:.1f}" in shown
    assert name in shown


def test_speed_up_has_the_spread_of_its_sessions():
    slow = played("recompute", answers([100.0] * 5), answers([100.0] * 5))
    fast = played("trust", answers([10.0] * 5), answers([50.0] * 5))
    found = speed_up(slow, fast, 50)
    assert found.value == pytest.approx(100 / 30)
    assert (found.low, found.high) == (pytest.approx(2), pytest.approx(10))
    with pytest.raises(ValueError, match="played 2 sessions, fast 1"):
        speed_up(slow, played("fast", answers([1.0])), 50)


def test_deadlines_scale_with_the_machine():
    assert scaled_deadline_ms("kitchen", 2000) == pytest.approx(500)
    assert scaled_deadline_ms("inspection", 500) == pytest.approx(200)
