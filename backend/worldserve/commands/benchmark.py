"""`ctrlcache benchmark`: the rivals on the same clips and traces, one server each.

    ctrlcache benchmark --quick
    ctrlcache benchmark kitchen inspection edudemo --control-trace trace-1.csv

What is played is kept in a work directory, so an interrupted run goes on where it was.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from ctrlcache.errors import ConfigError, CtrlCacheError
from worldserve.bench.clips import load_clips
from worldserve.bench.hands import hand_actions, read_recording
from worldserve.bench.progress import Load, TimeLeft, in_words
from worldserve.bench.rivals import RIVALS
from worldserve.bench.runner import REFERENCE, Plan, Session, play_rival, to_play
from worldserve.bench.scoreboard import DEADLINES_S, load_played, scaled_deadline_ms, score
from worldserve.bench.servers import Servers
from worldserve.bench.stores import redis_missing
from worldserve.bench.truth import Truths
from worldserve.bench.workload import HABITS, Controls, act

__all__ = ["benchmark"]

_QUICK = ("stateful", "recompute", "response", "trust", "worldcache")
_QUICK_CLIPS, _QUICK_ASKS, _QUICK_USERS = 1, 4, 2
#: Of a run's name in the work directory; file systems take 255 characters.
_LONGEST = 200


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
    steps: Annotated[
        int | None, typer.Option(min=1, help="Steps of the generator, for all rivals alike.")
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="key=value of the model, for all rivals.")
    ] = None,
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
        users = None
        if quick:
            players = players if rivals else list(_QUICK)
            clips, asks = clips or _QUICK_CLIPS, asks or _QUICK_ASKS
            users = _QUICK_USERS
        model = _settings(setting or [], steps)
        if drain:
            model.setdefault("share_thinking", "false")  # what two do at once has no order
        served = _Served.of(Path(model.get("weights_dir", repository / "world_model" / "1")))
        traces = control_trace or []
        sessions = _sessions(chosen, clips, asks, users, seed, traces, served.views)
        settings = {
            "clips": clips or "all",
            "questions": asks or "by suite",
            "seed": seed,
            "budget": max_error,
            "pace": "drained" if drain else "real",
            "hands": "+".join(path.stem for path in traces) or "none",
            "weights": served.digest,
            "actions": _digest(sessions),
            **{key: value for key, value in model.items() if key != "weights_dir"},
        }
        plan = Plan(
            repository,
            work / _run_name(settings, quick),
            served.scale,
            served.operations,
            served.logits,
            max_error,
            drain,
            Truths(work / "truth"),
            model,
        )
        _play_all(players, sessions, plan, restart, share=quick)
        _report(chosen, players, sessions, plan, out, settings, quick)
    except CtrlCacheError as error:
        raise SystemExit(f"benchmark: {error}") from error


def _digest(sessions: list[Session]) -> str:
    """Of what is played: another model of users goes on with nobody's sessions but its own."""
    played = [(session.name, list(session.actions)) for session in sessions]
    return hashlib.sha256(repr(played).encode()).hexdigest()[:8]


def _names(given: list[str] | None, known: tuple[str, ...], what: str) -> list[str]:
    for name in given or ():
        if name not in known:
            raise typer.BadParameter(f"unknown {what} {name!r}; known: {', '.join(known)}")
    return list(given or known)


def _settings(pairs: list[str], steps: int | None) -> dict[str, str]:
    found: dict[str, str] = {} if steps is None else {"generator_steps": str(steps)}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not (key and equals):
            raise ConfigError(f"--set {pair!r}; expected key=value")
        found[key] = value
    if "weights_dir" in found:
        found["weights_dir"] = str(Path(found["weights_dir"]).resolve())
    return found


@dataclass(frozen=True, eq=False)
class _Served:
    """What the served weights say of themselves. digest: of all that answers depend on."""

    scale: Controls
    operations: tuple[str, ...]
    logits: int
    views: tuple[str, ...]
    digest: str

    @classmethod
    def of(cls, weights: Path) -> _Served:
        try:
            raw = json.loads((weights / "config.json").read_text())
        except OSError as error:
            raise ConfigError(f"weights in {str(weights)!r}: {error}") from error
        seen = hashlib.sha256()
        for path in sorted([*weights.glob("*.json"), *weights.glob("*.safetensors")]):
            seen.update(path.name.encode() + path.read_bytes())
        network = raw["network"]
        return cls(
            np.asarray(raw["statistics"]["state_scale"], np.float32),
            tuple(network["operations"]),
            int(network["state"]["operations"][0]),
            tuple(network["views"]),
            seen.hexdigest()[:12],
        )


def _sessions(
    suites: list[str],
    clips: int | None,
    asks: int | None,
    users: int | None,
    seed: int,
    traces: list[Path],
    views: tuple[str, ...],
) -> list[Session]:
    """What is played. views: those of the served model; who asks for another one gets his own."""
    recordings = [read_recording(path) for path in traces]
    found: list[Session] = []
    for suite in suites:
        habits = HABITS[suite]
        habits = replace(habits, asks=asks or habits.asks, users=users or habits.users)
        shown = load_clips(suite, clips)
        for number, clip in enumerate(shown):
            played = clip if clip.other_view in views else replace(clip, other=None)
            for user in range(habits.users):
                whole = act(clip, HABITS[suite], user, seed)
                found.append(Session(played, user, "model", act(clip, habits, user, seed), whole))
            if recordings:
                # Each clip gets another stretch of another recording.
                recording = recordings[number % len(recordings)]
                parts = -(-len(shown) // len(recordings))
                stretch = recording.part(number // len(recordings), parts)
                found.append(Session(played, 0, "hands", hand_actions(clip, habits, stretch)))
    return sorted(found, key=lambda session: (session.clip.suite, session.source != "model"))


def _run_name(settings: dict[str, Any], quick: bool) -> str:
    parts = ["quick" if quick else "full", *(f"{key}-{value}" for key, value in settings.items())]
    name = "_".join(part.replace(" ", "-").replace("/", "-") for part in parts)
    if len(name) <= _LONGEST:
        return name
    return f"{name[:_LONGEST]}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


def _play_all(
    players: list[str], sessions: list[Session], plan: Plan, restart: bool, share: bool
) -> None:
    if restart and plan.work.exists():
        shutil.rmtree(plan.work)
    if REFERENCE not in players:
        players.insert(0, REFERENCE)
    players.sort(key=lambda name: name != REFERENCE)
    missing = redis_missing()
    if missing and "redis" in players:
        typer.echo(f"without the rival redis: {missing}", err=True)
        players.remove("redis")
    waiting = [name for name in players if to_play(RIVALS[name], sessions, plan)]
    for name in players:
        if name not in waiting:
            typer.echo(f"{name}: played before (--restart forgets it)")
    actions = [action for session in sessions for action in session.actions]
    pauses_s = 0.0 if plan.drain else sum(action.pause_s for action in actions)
    left = TimeLeft({name: Load(len(actions), pauses_s) for name in waiting})
    with (
        _bar(len(actions) * len(waiting)) as tell,
        Servers(plan.repository, plan.settings, sessions[0].clip, share) as servers,
    ):
        for name in waiting:
            left.starting(name)
            tell(name, f"about {in_words(left.seconds)} left", 0)

            def acted(pause_s: float, name: str = name) -> None:
                left.acted(pause_s)
                tell(name, f"about {in_words(left.seconds)} left", 1)

            play_rival(RIVALS[name], sessions, plan, servers, acted)
            left.done()


@contextmanager
def _bar(total: int) -> Iterator[Callable[[str, str, int], None]]:
    """A progress bar, which is told who plays, what is left, and how many actions are done. Where
    it goes to a file, it writes a line for each rival."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console()
    columns = (TextColumn("{task.description:>12}"), BarColumn(20), MofNCompleteColumn())
    with Progress(*columns, TextColumn("{task.fields[left]}"), console=console) as progress:
        bar = progress.add_task("", total=total, left="")
        last = ""

        def tell(name: str, left: str, done: int) -> None:
            nonlocal last
            progress.update(bar, description=name, left=left, advance=done)
            if name != last and not console.is_terminal:
                typer.echo(f"{name}: begins; {left}")
            last = name

        yield tell


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
