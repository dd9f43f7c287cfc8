"""What a further view of a scene costs against the first, and how good it is.

    python benchmarks/further_view.py [--clips 9] [--context 32] [--threads 1] [--weights DIR]
                                      [--json FILE]

For moments of each suite's test clips: the first view's prediction of eight frames (`cold`: with
all its context to encode; `warm`: with only its last frame new), and what another camera will see,
carried over from that rollout: its last frame embedded, the head for further views, the generator.
PSNR of those, of a rollout of that camera's own, and of its last frame held, against the recording.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from worldserve.bench.report import machine
from worldserve.data.clips import load_suite_clips
from worldserve.data.suites import SUITES
from worldserve.models.reference import ReferenceWorldModel
from worldserve.training.further import further_view

PROJECT = Path(__file__).resolve().parent.parent
WEIGHTS = PROJECT / "model_repository" / "world_model" / "1"
RESULTS = Path(__file__).parent / "results" / "further_view.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clips", type=int, default=9, help="of each suite, two moments of each")
    parser.add_argument("--context", type=int, default=32, help="frames of context")
    parser.add_argument("--threads", type=int, default=1, help="of torch")
    parser.add_argument("--weights", type=Path, default=WEIGHTS)
    parser.add_argument("--json", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    model = ReferenceWorldModel.load(arguments.weights, threads=arguments.threads)
    found = {}
    for suite in SUITES:
        packed = load_suite_clips(suite, PROJECT / "benchmarks" / "clips", arguments.clips)
        pairs = [(clip.seen("front"), clip.seen("side")) for clip in packed]
        found[suite] = further_view(model, pairs, arguments.context)
    table = Table(
        "suite",
        "first view, ms (cold; warm)",
        "further, ms",
        "times less (cold; warm)",
        "PSNR at 1/2/4/8 steps, dB: carried",
        "own rollout",
        "held",
    )
    for suite, row in found.items():
        cold, warm, further = (
            row[name] for name in ("first_view_ms", "first_view_warm_ms", "further_view_ms")
        )
        table.add_row(
            suite,
            f"{cold:.0f}; {warm:.0f}",
            f"{further:.0f}",
            f"{cold / further:.1f}; {warm / further:.1f}",
            *(
                " ".join(f"{v:.1f}" for v in row[f"psnr_{how}_db"])
                for how in ("carried", "own", "copy")
            ),
        )
    Console(width=140).print(table)
    settings = {
        "clips": arguments.clips,
        "context": arguments.context,
        "threads": arguments.threads,
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    content = {"made_on": machine(), "settings": settings, "suites": found}
    arguments.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
