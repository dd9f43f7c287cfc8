"""`ctrlcache benchmark`: the rivals on the same clips and traces, one server each.

    ctrlcache benchmark --quick
    ctrlcache benchmark kitchen inspection edudemo --control-trace trace-1.csv

What is played is kept in a work directory, so an interrupted run goes on where it was.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from ctrlcache.errors import CtrlCacheError
from worldserve.bench.clips import load_clips
from worldserve.bench.hands import hand_actions, read_recording
from worldserve.bench.rivals import RIVALS
from worldserve.bench.runner import REFERENCE, Plan, Session, play_rival
from worldserve.bench.scoreboard import DEADLINES_S, load_played, scaled_deadline_ms, score
from worldserve.bench.stores import redis_missing
from worldserve.bench.truth import Truths
from worldserve.bench.workload import HABITS, act

__all__ = ["benchmark"]

_QUICK = ("stateful", "recompute", "response", "trust")
_QUICK_CLIPS, _QUICK_ASKS = 2, 16


def benchmark(
    suites: Annotated[
        list[str] | None, typer.Argument(help=f"Of {', '.join(HABITS)}; all by default.")
    ] = None,
    rivals: Annotated[
        list[str] | None, typer.Option("--rival", help=f"Of {', '.join(RIVALS)}; all by default.")
    ] = None,
    quick: Annotated[bool, typer.Option(help="A taste of it, in under three minutes.")] = False,
    clips: Annotated[int | None, typer.Option(min=1, help="Clips per suite, at most.")] = None,
    asks: Annotated[int | None, typer.Option(min=2, help="Questions per session.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the modelled users.")] = 0,
    control_trace: Annotated[
        list[Path] | None,
        typer.Option(help="Recording of a real hand, as in docs/benchmarks.md; may be repeated."),
    ] = None,
    max_error: Annotated[float, typer.Option(min=0.0, help="Error budget of questions.")] = 0.02,
    drain: Annotated[
        bool, typer.Option(help="Finish background work between questions instead of pausing.")
    ] = False,
    repository: Annotated[Path, typer.Option(help="Model repository.")] = Path("model_repository"),
    work: Annotated[Path, typer.Option(help="Where what was played is kept.")] = Path(
        ".cache/benchmark"
    ),
    restart: Annotated[bool, typer.Option(help="Forget what was played before.")] = False,
    out: Annotated[Path, typer.Option(help="Where the report goes.")] = Path("benchmarks/results"),
    url: Annotated[
        str | None, typer.Option(help="Measure a running server, with its cache and without.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="With --url: rounds.")] = 3,
    pause_s: Annotated[float, typer.Option(min=0.0, help="With --url: thinking time.")] = 0.3,
) -> None:
    """Measure the cache against its rivals, on modelled users and on recordings of real ones."""
    try:
        if url is not None:
            from worldserve.bench.running import measure_running

            folder = Path("client_examples/clips")
            target = out / "running.json"
            measure_running(url, folder, clips or 3, rounds, max_error, pause_s, target)
            return
        chosen = _names(suites, tuple(HABITS), "suite")
        players = _names(rivals, tuple(RIVALS), "rival")
        if quick:
            chosen = chosen if suites else ["kitchen"]
            players = players if rivals else list(_QUICK)
            clips, asks = clips or _QUICK_CLIPS, asks or _QUICK_ASKS
        sessions = _sessions(chosen, clips, asks, seed, control_trace or [])
        settings = {
            "clips": clips or "all",
            "questions": asks or "by suite",
            "seed": seed,
            "budget": max_error,
            "pace": "drained" if drain else "real",
        }
        plan = _plan(repository, work / _run_name(settings, quick), max_error, drain)
        _play_all(players, sessions, plan, restart)
        _report(chosen, players, sessions, plan, out, settings, quick)
    except CtrlCacheError as error:
        raise SystemExit(f"benchmark: {error}") from error


def _names(given: list[str] | None, known: tuple[str, ...], what: str) -> list[str]:
    for name in given or ():
        if name not in known:
            raise typer.BadParameter(f"unknown {what} {name!r}; known: {', '.join(known)}")
    return list(given or known)


def _sessions(
    suites: list[str], clips: int | None, asks: int | None, seed: int, traces: list[Path]
) -> list[Session]:
    recordings = [read_recording(path) for path in traces]
    found: list[Session] = []
    for suite in suites:
        habits = HABITS[suite]
        if asks is not None:
            habits = replace(habits, asks=asks)
        shown = load_clips(suite, clips)
        for clip in shown:
            found += [
                Session(clip, user, "model", act(clip, habits, user, seed))
                for user in range(habits.users)
            ]
        for number, clip in enumerate(shown if recordings else ()):
            # Each clip gets another stretch of another recording.
            recording = recordings[number % len(recordings)]
            parts = -(-len(shown) // len(recordings))
            stretch = recording.part(number // len(recordings), parts)
            found.append(Session(clip, 0, "hands", hand_actions(clip, habits, stretch)))
    return found


def _plan(repository: Path, work: Path, max_error: float, drain: bool) -> Plan:
    raw = json.loads((repository / "world_model" / "1" / "config.json").read_text())
    scale = np.asarray(raw["statistics"]["state_scale"], np.float32)
    operations = tuple(raw["network"]["operations"])
    first = int(raw["network"]["state"]["operations"][0])
    truths = Truths(work.parent / "truth")
    return Plan(repository, work, scale, operations, first, max_error, drain, truths)


def _run_name(settings: dict[str, Any], quick: bool) -> str:
    parts = ["quick" if quick else "full", *(f"{key}-{value}" for key, value in settings.items())]
    return "_".join(part.replace(" ", "-") for part in parts)


def _play_all(players: list[str], sessions: list[Session], plan: Plan, restart: bool) -> None:
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    if restart and plan.work.exists():
        shutil.rmtree(plan.work)
    if REFERENCE not in players:
        players.insert(0, REFERENCE)
    players.sort(key=lambda name: name != REFERENCE)
    missing = redis_missing()
    if missing and "redis" in players:
        typer.echo(f"without the rival redis: {missing}", err=True)
        players.remove("redis")
    questions = sum(session.questions for session in sessions)
    columns = (TextColumn("{task.description:>14}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn()) as progress:
        bar = progress.add_task("", total=questions * len(players))
        for name in players:
            progress.update(bar, description=name)
            play_rival(RIVALS[name], sessions, plan, lambda: progress.advance(bar))


def _report(
    suites: list[str],
    players: list[str],
    sessions: list[Session],
    plan: Plan,
    out: Path,
    settings: dict[str, Any],
    quick: bool,
) -> None:
    from rich.console import Console
    from rich.markdown import Markdown

    from worldserve.bench import pictures
    from worldserve.bench.report import SuiteReport, markdown, write_json

    reports = []
    for suite in suites:
        for source in sorted({s.source for s in sessions if s.clip.suite == suite}, reverse=True):
            played = {name: load_played(plan.work, name, suite, source) for name in players}
            there = {name: one for name, one in played.items() if one is not None}
            slow = there.get("recompute", there[REFERENCE])
            uncached_ms = float(np.median(np.concatenate(slow.latencies())))
            deadline_ms = scaled_deadline_ms(suite, uncached_ms)
            absolute_ms = 1e3 * DEADLINES_S[suite]
            scores = {name: score(one, deadline_ms, absolute_ms) for name, one in there.items()}
            reports.append(
                SuiteReport(
                    suite, source, len(there[REFERENCE].sessions), deadline_ms, scores, there
                )
            )
    stem = "benchmark-quick" if quick else "benchmark"
    write_json(out / f"{stem}.json", reports, settings)
    text = markdown(reports, settings)
    (out / f"{stem}.md").write_text(text)
    pictures.latency_picture(reports, out / f"{stem}-latency.png")
    pictures.hits_picture(reports, out / f"{stem}-hits.png")
    pictures.error_picture(reports, out / f"{stem}-error.png")
    Console().print(Markdown(text))
    typer.echo(f"written: {out}/{stem}.json, .md and pictures")
