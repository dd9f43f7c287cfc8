"""The runbook's formulas are what the server computes, and its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from observed import PROJECT, RUNBOOK, anchors, rules
from tiny_world import TINY

from ctrlcache.metrics import METRICS
from worldserve import health
from worldserve.service import WorldService
from worldserve.session_store import SessionLimits, capacity

TEXT = RUNBOOK.read_text()


def session_bytes(history: int, frame: int, window: int, slice_bytes: int) -> int:
    """The formula as it stands in the runbook."""
    formula = re.search(r"^ +session  = (.+)$", TEXT, re.MULTILINE)[1]
    values = {"history_frames": history, "frame": frame, "window": window, "slice": slice_bytes}
    for name, value in values.items():
        formula = re.sub(rf"\b{name}\b", str(value), formula)
    assert re.fullmatch(r"[\d\sx+()]+", formula), formula
    return int(eval(formula.replace("x", "*")))


@pytest.mark.parametrize("hot", [1 << 26, 1 << 30, 1 << 32])
@pytest.mark.parametrize("history", [64, 256])
def test_the_formula_for_sessions_is_the_servers(hot, history):
    """What the page says fits is what a server lets in."""
    limits = SessionLimits(history=history, window=32)
    one = session_bytes(history, 49_920, 32, 405_504)
    assert capacity(hot, 49_920, 405_504, limits) == int(hot * 2 / 3 / one)


def test_a_served_model_states_that_number(tmp_path):
    """The limit of a service without a stated one."""
    settings = {
        "world_model_class": TINY,
        "shm_dir": str(tmp_path / "shm"),
        "hot_size_bytes": "64MiB",
        "history_frames": "64",
    }
    service = WorldService(settings, tmp_path)
    try:
        spec = service.model.spec
        conditioning, _ = service.model.condition("", "")
        [tokens] = service.model.embed(np.zeros((1, *spec.frame_px, 3), np.uint8))
        control = np.zeros((1, spec.control_dim), np.float32)
        memory = service.model.assemble((), 0)
        made = service.model.absorb(memory, tokens[None], control, conditioning).slices[0]
        frame = max(tokens.nbytes, 3 * spec.frame_px[0] * spec.frame_px[1])
        one = session_bytes(64, frame, spec.window, made.nbytes)
        assert service.sessions.limits.most == int((64 << 20) * 2 / 3 / one)
    finally:
        service.close()


def test_the_numbers_of_the_reference_model_follow():
    """27.1 MB and 52 sessions in 2 GiB are what formula and sizes give."""
    sizes = re.search(r"tokens of ([\d,]+) bytes, slices of ([\d,]+), window (\d+)", TEXT)
    frame, slice_bytes, window = (int(each.replace(",", "")) for each in sizes.groups())
    one = session_bytes(256, frame, window, slice_bytes)
    assert f"{one / 1e6:.1f} MB" in TEXT
    for gib in (2, 4):
        assert f"{int(gib * 2**30 * 2 / 3 / one)} in {gib} GiB" in TEXT.replace(
            " sessions in", " in"
        )


def test_links_inside_the_page_lead_to_a_heading():
    """No section sends the reader into nothing."""
    known = anchors(RUNBOOK)
    assert set(re.findall(r"\]\(#([\w-]+)\)", TEXT)) <= known
    for page in re.findall(r"\]\(([\w.-]+\.md)", TEXT):
        assert (PROJECT / "docs" / page).exists(), page


def test_every_alert_is_named_in_its_section():
    """Whoever searches for the alert's name finds it once."""
    for rule in rules("alert"):
        assert TEXT.count(f"**{rule['alert']}**") == 1, rule["alert"]


def test_metrics_that_the_page_asks_for_exist():
    """A command that greps for a metric finds one."""
    ours = {metric.name for metric in METRICS}
    page = set(re.findall(r"ctrlcache_supervisor_\w+", Path(health.__file__).read_text()))
    page |= {"ctrlcache_supervisor_instances_alive"}  # put together there
    for name in re.findall(r"ctrlcache_[a-z_]+[a-z](?![\w(|*])", TEXT):
        base = re.sub(r"_(sum|count|bucket)$", "", name)
        assert any(each.startswith(base) for each in ours | page), name


def test_ten_points_before_going_live():
    """The list is as long as it is said to be."""
    _, _, last = TEXT.partition("## Before going live")
    assert re.findall(r"^(\d+)\. ", last, re.MULTILINE) == [str(n) for n in range(1, 11)]
