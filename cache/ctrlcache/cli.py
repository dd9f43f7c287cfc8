"""The program `ctrlcache`. Commands that need a server or a model come by entry point.

This package knows neither Triton nor torch; `worldserve` registers what does in the entry-point
group `ctrlcache.commands`, as any other package may.
"""

from __future__ import annotations

from collections.abc import Sequence

from ctrlcache.lazy import Command, run

__all__ = ["COMMANDS", "main"]

GROUP = "ctrlcache.commands"

COMMANDS = (
    Command("up", "Start the server with all it needs; Ctrl-C stops it."),
    Command("validate-env", "Look whether this machine can serve, and how to mend what is wrong."),
    Command(
        "calibrate",
        "Calibrate control devices, and the trust in approximate answers.",
        "ctrlcache.commands.calibrate:app",
    ),
    Command("analyze", "Show what in a video moves and matters: where features can be reused."),
    Command("warmup", "Fill the cache with typical interactions."),
    Command("warm-report", "Measure the first answer after a restart, with a warm-up and without."),
    Command("benchmark", "Measure a running server with and without its cache."),
    Command(
        "stats",
        "Show what is cached: scores, radii, hits, occupancy.",
        "ctrlcache.commands.stats:command",
    ),
    Command("index", "Rebuild the index from the stored couplets.", "ctrlcache.commands.index:app"),
    Command("verify", "Read and check every stored record.", "ctrlcache.commands.verify:command"),
    Command(
        "templates",
        "Build and list the cold templates of tasks.",
        "ctrlcache.commands.templates:app",
    ),
    Command(
        "backup", "Back up a warm directory, in use or not.", "ctrlcache.commands.backup:backup"
    ),
    Command("restore", "Roll back to an earlier backup.", "ctrlcache.commands.backup:restore"),
    Command("debug-transfer", "Show how one couplet's answer migrates to other controls."),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the program `ctrlcache`."""
    run(
        "ctrlcache",
        "Control-aware caching for interactive video world models on Triton.",
        COMMANDS,
        GROUP,
        arguments,
    )


if __name__ == "__main__":
    main()
