"""Stands, crowds, and the table of what happened.

`make test` runs a short cut; `make faults` (`CTRLCACHE_FAULTS=full`) all of it, with 64 people at
work, and writes benchmarks/results/faults.json and the table of docs/faults.md.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from crowd import Crowd
from reference import Play
from report import Row, markdown, median, write_page, write_results
from stand import Stand
from tiny_world import trust_the_tiny_model

PROJECT = Path(__file__).resolve().parents[2]
FULL = os.environ.get("CTRLCACHE_FAULTS") == "full"
PEOPLE = int(os.environ.get("CTRLCACHE_PEOPLE", "64" if FULL else "16"))
_rows: list[Row] = []
_began = time.monotonic()
_numbers = itertools.count()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `slow` belong to `make faults`."""
    for item in items:
        if item.path.parent == Path(__file__).parent and "slow" in item.keywords and not FULL:
            item.add_marker(pytest.mark.skip(reason="part of `make faults`"))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _rows:
        terminalreporter.section("faults")
        terminalreporter.write(markdown(_rows))


def pytest_sessionfinish(exitstatus: int) -> None:
    if FULL and exitstatus == 0 and len(_rows) > 10:
        write_results(_rows, time.monotonic() - _began, PROJECT / "benchmarks/results/faults.json")
        write_page(_rows, PROJECT / "docs/faults.md")


@pytest.fixture
def stand(tmp_path: Path) -> Iterator[Callable[..., Stand]]:
    """Start servers: `stand("--instances", "2", settings={...})`; none may leave anything."""
    stands: list[Stand] = []

    def factory(*options: str, **more: Any) -> Stand:
        directory = more.pop("directory", tmp_path / f"stand-{next(_numbers)}")
        weights = tmp_path / "weights"
        if not weights.exists():
            weights.mkdir()
            trust_the_tiny_model(weights)
        directory.mkdir(parents=True, exist_ok=True)
        settings = {"max_sessions": "100", "weights_dir": str(weights), **more.pop("settings", {})}
        stands.append(Stand(directory, *options, settings=settings, **more))
        return stands[-1]

    yield factory
    failures = []
    for each in stands:
        try:
            each.close()
        except AssertionError as error:
            failures.append(str(error))
    assert not failures, failures


@pytest.fixture
def crowd() -> Iterator[Callable[..., Crowd]]:
    """People at work: `crowd(stand)`, 64 of them, fewer in the short cut."""
    crowds: list[Crowd] = []

    def factory(*stands: Stand, size: int = PEOPLE, **options: Any) -> Crowd:
        crowds.append(Crowd(size, lambda: stands[0].endpoints, **options))
        return crowds[-1]

    yield factory
    for each in crowds:
        for person in each.people:
            person.stop_soon()
        for person in each.people:
            person.join()


@pytest.fixture
def verdict() -> Callable[..., Row]:
    """`verdict("kill -9 of the stub", people, server)`: nothing wrong, nothing lost; a row."""

    def judge(fault: str, people: Crowd, *stands: Stand) -> Row:
        for each in stands:
            people.until(each.mended)
        total = people.finish()
        row = Row(
            fault=fault,
            sessions=len(people.people),
            exact=total.answers["exact"],
            near=total.answers["near"],
            refused=sum(total.refusals.values()),
            wrong=len(total.wrong),
            over_bound=total.over_bound,
            lost=len(total.lost),
            recovery_median_s=median(people.recovery_s),
            recovery_last_s=max(people.recovery_s, default=None),
            supervisor="; ".join(filter(None, (each.events() for each in stands))),
        )
        _rows.append(row)
        print(row, dict(total.refusals), total.said.most_common(4))
        for each in stands:  # shown where a test fails
            print(each.said()[-4000:])
        assert not total.wrong, total.wrong[:5]
        assert not total.lost, total.lost[:5]
        assert total.over_bound <= 0.05 * max(total.answers["near"], 20)
        return row

    return judge


@pytest.fixture
def script_verdict() -> Callable[..., None]:
    """A row for plays of a script, whose answers were compared already."""

    def judge(fault: str, plays: list[Play], server: Stand) -> None:
        back = [each.back_s for each in plays if each.back_s is not None]
        _rows.append(
            Row(
                fault=fault,
                sessions=len(plays),
                exact=sum(len(each.digests) for each in plays),
                near=0,
                refused=sum(each.refused for each in plays),
                wrong=0,
                over_bound=0,
                lost=0,
                recovery_median_s=median(back),
                recovery_last_s=max(back),
                supervisor=server.events(),
            )
        )

    return judge
