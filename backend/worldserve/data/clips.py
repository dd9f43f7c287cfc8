"""The test clips that benchmarks replay, small enough to lie in the repository.

`worldserve data clips` records them in simulation, from seeds that no other split uses, and packs
them; `load_suite_clips` reads a pack back without any simulator. A pack is one .npz without pickle
for each suite: the true physical states and controls as they are, the frames of each view as H.264
(about 40 dB for the first view; a camera would have lost more) or, where that is smaller, lossless.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import zstandard
from numpy.typing import NDArray

from ctrlcache.errors import InvalidInput
from worldserve.data.dataset import Clip
from worldserve.data.episode import Simulator, open_simulator
from worldserve.data.suites import Operation, Suite, get_suite

__all__ = ["CLIPS", "SEED", "SuiteClip", "clip_plan", "load_suite_clips", "pack_suite_clips"]

#: where packs lie, from the root of the repository; the seed of all their episodes
CLIPS = Path("benchmarks/clips")
SEED = 40_000
_QUALITY = (19, 23)  # constant rate factor of each view
_LARGEST = 1 << 31  # bytes of one clip's frames; more is no pack of ours


@dataclass(frozen=True)
class SuiteClip:
    """One recorded clip of T frames with the truth beside it.

    frames: of each view (T, h, w, 3) uint8; controls (T - 1, 4), control t leads from frame t to
    t + 1; physics (T, P), see PHYSICS_NAMES; paraphrases: the prompt in other words.
    """

    name: str
    operation: str
    prompt: str
    paraphrases: tuple[str, ...]
    frames: dict[str, NDArray[np.uint8]]
    controls: NDArray[np.float32]
    physics: NDArray[np.float32]
    rate_hz: float

    def seen(self, view: str) -> Clip:
        """The clip from one camera."""
        return Clip(
            self.frames[view], self.controls, self.physics, self.operation, self.prompt, view
        )


def clip_plan(suite: Suite) -> list[tuple[str, Operation, int]]:
    """(name, operation, episode index) of every clip: the operations in turn."""
    count = len(suite.operations)
    plan = []
    for number in range(suite.clips):
        operation, index = suite.operations[number % count], number // count
        plan.append((f"{operation.name}-{index}", operation, index))
    return plan


def pack_suite_clips(
    suite: Suite, target: Path, advance: Callable[[], None] = lambda: None
) -> Path:
    """Record every clip of `suite` and write its pack into the directory `target`."""
    arrays: dict[str, NDArray[Any]] = {}
    rows: list[dict[str, Any]] = []
    simulators: dict[str, Simulator] = {}
    for number, (name, operation, index) in enumerate(clip_plan(suite)):
        simulator = simulators.setdefault(operation.name, open_simulator(suite, operation))
        episode = simulator.episode(SEED, index, suite.clip_frames)
        arrays[f"controls_{number}"] = episode.controls
        arrays[f"physics_{number}"] = episode.physics
        codecs = []
        for view in range(episode.frames.shape[1]):
            codec, data = _encode(episode.frames[:, view], suite.rate_hz, _QUALITY[view])
            arrays[f"frames_{number}_{view}"] = np.frombuffer(data, np.uint8)
            codecs.append(codec)
        rows.append({"name": name, "operation": operation.name, "codecs": codecs})
        advance()
    for simulator in simulators.values():
        simulator.close()
    shape = [suite.clip_frames, suite.frame_px, suite.frame_px, 3]
    index_row = {"suite": suite.name, "seed": SEED, "shape": shape, "clips": rows}
    arrays["index"] = np.array(json.dumps(index_row))
    target.mkdir(parents=True, exist_ok=True)
    path = target / f"{suite.name}.npz"
    np.savez(path, **arrays)
    return path


def load_suite_clips(
    suite: str,
    directory: Path = CLIPS,
    limit: int | None = None,
    views: Sequence[str] | None = None,
) -> list[SuiteClip]:
    """The first `limit` clips of a suite (all without), in the order of the pack.

    views: the cameras whose frames are decoded; all without. FileNotFoundError tells how to make a
    missing pack; InvalidInput names a pack that is not one.
    """
    definition = get_suite(suite)
    path = directory / f"{suite}.npz"
    if not path.exists():
        raise FileNotFoundError(
            f"no clips of suite {suite!r} at {path}; make them with: "
            f"worldserve data clips --suite {suite} --target {directory}"
        )
    operations = {operation.name: operation for operation in definition.operations}
    cameras = {camera.name: i for i, camera in enumerate(definition.cameras)}
    wanted = list(cameras) if views is None else list(views)
    unknown = [view for view in wanted if view not in cameras]
    if unknown:
        raise InvalidInput(f"views {unknown}; suite {suite!r} has {', '.join(cameras)}")
    try:
        with np.load(path) as pack:
            index = json.loads(str(pack["index"]))
            shape = tuple(index["shape"])
            made = []
            for number, row in enumerate(index["clips"][:limit]):
                operation = operations[row["operation"]]
                frames = {
                    view: _decode(
                        row["codecs"][cameras[view]],
                        pack[f"frames_{number}_{cameras[view]}"].tobytes(),
                        shape,
                    )
                    for view in wanted
                }
                made.append(
                    SuiteClip(
                        row["name"],
                        operation.name,
                        operation.prompt,
                        operation.paraphrases,
                        frames,
                        pack[f"controls_{number}"],
                        pack[f"physics_{number}"],
                        definition.rate_hz,
                    )
                )
            return made
    except (KeyError, ValueError, IndexError, OSError, BadZipFile, zstandard.ZstdError) as error:
        raise InvalidInput(f"{path} is no pack of clips of {suite!r}: {error}") from error


def _encode(frames: NDArray[np.uint8], rate_hz: float, quality: int) -> tuple[str, bytes]:
    """("h264" or "zstd", data), whichever is smaller."""
    lossless = zstandard.ZstdCompressor(level=19).compress(frames.tobytes())
    video = _to_h264(frames, rate_hz, quality)
    return ("zstd", lossless) if len(lossless) <= len(video) else ("h264", video)


def _decode(codec: str, data: bytes, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    if codec == "zstd":
        raw = zstandard.ZstdDecompressor().decompress(data, max_output_size=_LARGEST)
        return np.frombuffer(raw, np.uint8).reshape(shape).copy()  # for torch, which warns else
    if codec != "h264":
        raise ValueError(f"codec {codec!r}")
    import av

    with av.open(io.BytesIO(data), "r") as container:
        frames = [f.to_ndarray(format="rgb24") for f in container.decode(video=0)]
    stacked: NDArray[np.uint8] = np.stack(frames).astype(np.uint8, copy=False)
    if stacked.shape != shape:
        raise ValueError(f"frames {stacked.shape}, expected {shape}")
    return stacked


def _to_h264(frames: NDArray[np.uint8], rate_hz: float, quality: int) -> bytes:
    import av

    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=round(rate_hz))
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv444p"
        stream.options = {"crf": str(quality), "preset": "veryslow", "threads": "1"}
        for image in frames:
            picture = av.VideoFrame.from_ndarray(image, format="rgb24")
            container.mux(stream.encode(picture))
        container.mux(stream.encode())
    return buffer.getvalue()
