"""Cut the clips that are shipped with the client examples out of the test split.

    python -m worldserve.data.export --root data --target client_examples/clips

Each is an .npz without pickle: frames (T, h, w, 3) uint8, controls (T - 1, 4) float32 as the device
gave them (control t leads from frame t to t + 1), physics (T, P) float32, operation, prompt, view.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from worldserve.data.dataset import Clip, clips
from worldserve.data.suites import Suite, get_suite

__all__ = ["SHIPPED", "Cut", "export_clips"]


@dataclass(frozen=True)
class Cut:
    """`frames` frames from `start` on of the `episode`th test episode of an operation."""

    operation: str
    episode: int
    start: int
    frames: int = 64


#: Chosen by eye: in each the hand takes hold of something and moves it to and fro.
SHIPPED = (
    Cut("door-open", episode=6, start=0),
    Cut("drawer-open", episode=6, start=12),
    Cut("coffee-pull", episode=6, start=10),
)


def export_clips(
    root: Path, suite: Suite, target: Path, cuts: Iterable[Cut] = SHIPPED
) -> list[Path]:
    """Write one file per cut; ValueError where the split has no such episode or is too short."""
    wanted = list(cuts)
    seen: dict[str, int] = {}
    found: dict[Cut, Clip] = {}
    for clip in clips(root, suite, "test"):
        episode = seen.get(clip.operation, 0)
        seen[clip.operation] = episode + 1
        for cut in wanted:
            if (cut.operation, cut.episode) == (clip.operation, episode):
                found[cut] = clip
    target.mkdir(parents=True, exist_ok=True)
    paths = []
    for cut in wanted:
        if cut not in found:
            raise ValueError(
                f"the test split of {suite.name!r} has no episode {cut.episode} of "
                f"{cut.operation!r}; it has {seen.get(cut.operation, 0)}"
            )
        path = target / f"{cut.operation}.npz"
        _write(path, found[cut], cut)
        paths.append(path)
    return paths


def _write(path: Path, clip: Clip, cut: Cut) -> None:
    stop = cut.start + cut.frames
    if stop > len(clip.frames):
        raise ValueError(f"{cut} ends at frame {stop} of an episode of {len(clip.frames)}")
    np.savez_compressed(
        path,
        frames=clip.frames[cut.start : stop],
        controls=clip.controls[cut.start : stop - 1],
        physics=clip.physics[cut.start : stop],
        operation=np.array(clip.operation),
        prompt=np.array(clip.prompt),
        view=np.array(clip.view),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Cut the shipped clips out of the test split.")
    parser.add_argument("--root", type=Path, default=Path("data"), help="where the suites lie")
    parser.add_argument("--suite", default="kitchen")
    parser.add_argument("--target", type=Path, default=Path("client_examples/clips"))
    arguments = parser.parse_args()
    suite = get_suite(arguments.suite)
    for path in export_clips(arguments.root, suite, arguments.target):
        print(f"{path}  {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
