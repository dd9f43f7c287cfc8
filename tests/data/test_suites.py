"""Suites as definitions: what every one of them promises to the rest."""

from __future__ import annotations

import itertools

import pytest

from worldserve.data.clips import clip_plan
from worldserve.data.suites import SUITES, VIEWS, get_suite
from worldserve.models.network import StateLayout


@pytest.mark.parametrize("suite", SUITES.values(), ids=lambda suite: suite.name)
def test_every_suite_is_seen_from_the_same_views(suite):
    """A model has one table of views: they are the same, in the same order."""
    assert tuple(camera.name for camera in suite.cameras) == VIEWS


def test_all_operations_fit_into_the_state_and_differ():
    """One logit for each operation of every suite, and no name twice."""
    names = [operation.name for suite in SUITES.values() for operation in suite.operations]
    first, last = StateLayout().operations
    assert len(names) == len(set(names)) <= last - first


def test_prompts_tell_operations_apart():
    """No two operations are called the same, in whatever words."""
    said = [
        words
        for suite in SUITES.values()
        for operation in suite.operations
        for words in (operation.prompt, *operation.paraphrases)
    ]
    assert len(said) == len(set(said))


@pytest.mark.parametrize("suite", SUITES.values(), ids=lambda suite: suite.name)
def test_seeds_of_splits_lie_further_apart_than_they_reach(suite):
    """The clips' seed, too, is not reached by any split: test scenes are never trained on."""
    seeds = sorted([*(split.seed for split in suite.splits), 40_000])
    most = max(split.episodes for split in suite.splits)
    assert all(b - a > most for a, b in itertools.pairwise(seeds))


@pytest.mark.parametrize(("name", "count"), [("kitchen", 47), ("inspection", 31), ("edudemo", 63)])
def test_clip_plan_takes_operations_in_turn(name, count):
    """As many clips as the suite promises, of about 22 s, no (operation, episode) twice."""
    suite = get_suite(name)
    plan = clip_plan(suite)
    assert len(plan) == len({(o.name, index) for _, o, index in plan}) == count
    assert {o.name for _, o, _ in plan} == {o.name for o in suite.operations}
    assert 21.5 < suite.clip_frames / suite.rate_hz < 22.5


def test_unknown_suite_and_split_are_named():
    """The error says what there is."""
    with pytest.raises(ValueError, match=r"'garden'.*edudemo, inspection, kitchen"):
        get_suite("garden")
    with pytest.raises(ValueError, match=r"'holdout'.*test, validation, train"):
        get_suite("kitchen").split("holdout")
