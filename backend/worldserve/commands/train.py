"""`worldserve train` and `worldserve evaluate`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

Data = Annotated[Path, typer.Option(help="Root of the generated episodes.")]
Suites = Annotated[list[str], typer.Option(help="Suite; several times for several.")]
Weights = Annotated[Path, typer.Option(help="Directory of the weights.")]
WEIGHTS = Path("model_repository/world_model/1")
ALL = ["kitchen", "inspection", "edudemo"]


def train(
    suite: Suites = ALL,
    data: Data = Path("data"),
    run: Annotated[Path, typer.Option(help="Checkpoints and logs; a stopped run resumes.")] = Path(
        "runs/all"
    ),
    weights: Weights = WEIGHTS,
    start: Annotated[
        Path | None,
        typer.Option(
            help="Weights of fewer suites to go on from, in shorter stages; "
            "their operations must be the first."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Same seed, same steps, same weights.")] = 0,
    threads: Annotated[int, typer.Option(min=1, help="Threads of torch.")] = 2,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 100,
    picture: Annotated[Path, typer.Option(help="Where the loss curves go.")] = Path(
        "docs/images/training.png"
    ),
) -> None:
    """Train the reference world model; resumes from the checkpoint in --run."""
    from worldserve.data.suites import get_suite
    from worldserve.training.report import curves
    from worldserve.training.train import FURTHER, STAGES, TrainConfig
    from worldserve.training.train import train as train_model

    train_model(
        TrainConfig(
            suites=tuple(get_suite(name) for name in suite),
            data=data,
            run=run,
            out=weights,
            seed=seed,
            threads=threads,
            checkpoint_every=checkpoint_every,
            stages=STAGES if start is None else FURTHER,
            start=start,
        )
    )
    curves(run / "log.jsonl", picture)
    typer.echo(f"weights written to {weights}, loss curves to {picture}")


def evaluate(
    suite: Suites = ALL,
    data: Data = Path("data"),
    weights: Weights = WEIGHTS,
    split: Annotated[str, typer.Option(help="test or validation.")] = "test",
    figures: Annotated[Path, typer.Option(help="Directory of the numbers, a file a suite.")] = Path(
        "docs/evaluation"
    ),
    pictures: Annotated[Path, typer.Option(help="Directory of the pictures.")] = Path(
        "docs/images"
    ),
    document: Annotated[
        Path, typer.Option(help="Markdown whose evaluation section is written.")
    ] = (Path("docs/world-model.md")),
    quick: Annotated[
        bool, typer.Option(help="First view and longest context only; prints, writes nothing.")
    ] = False,
) -> None:
    """Evaluate the model on held-out episodes, each figure with its baseline."""
    from worldserve.calibrate import REFERENCE, load_model
    from worldserve.data.suites import get_suite
    from worldserve.training.evaluate import evaluate as measure
    from worldserve.training.evaluate import picture
    from worldserve.training.report import brief, insert, model_card, report_suite, tables

    model = load_model(REFERENCE, weights)
    reports = {}
    for name in suite:
        definition = get_suite(name)
        if quick:
            typer.echo(brief(name, measure(model, definition, data, split, (32,)).figures[32]))
            continue
        report, predictions = report_suite(model, definition, data, split)
        reports[name] = report
        figures.mkdir(parents=True, exist_ok=True)
        (figures / f"{name}.json").write_text(json.dumps(report, indent=1) + "\n")
        picture(predictions, pictures / f"predictions-{name}.png")
    if quick:
        return
    text = tables(reports)
    insert(document, text)
    training = json.loads((weights / "config.json").read_text())["training"]
    model_card(weights, model.spec.weights_digest, training, reports)
    typer.echo(text)
    typer.echo(f"numbers in {figures} and {document}, pictures in {pictures}")
