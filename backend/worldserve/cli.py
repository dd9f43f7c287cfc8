"""The program `worldserve`: make data, train the reference model, evaluate it.

Needs the extra `[train]`; serving needs none of this.
"""

from __future__ import annotations

from collections.abc import Sequence

from ctrlcache.lazy import Command, run

__all__ = ["COMMANDS", "main"]

COMMANDS = (
    Command("data", "Generate episodes in simulation.", "worldserve.commands.data:app"),
    Command("train", "Train the reference world model.", "worldserve.commands.train:train"),
    Command(
        "train-adapter",
        "Train the state transfer adapter on pairs of the frozen model.",
        "worldserve.training.adapter:command",
    ),
    Command(
        "evaluate",
        "Evaluate the model on test episodes, against its baselines.",
        "worldserve.commands.train:evaluate",
    ),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the program `worldserve`."""
    run("worldserve", "Train and evaluate the world model.", COMMANDS, arguments=arguments)


if __name__ == "__main__":
    main()
