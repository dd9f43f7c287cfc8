"""`ctrlcache warmup`: play typical interactions to a running server; others find the answers."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from ctrlcache.errors import ConfigError
from worldserve.dial import ClientAccess, dial

__all__ = ["interactions", "warmup"]

_OUTPUTS = ("PREDICTED_FRAMES", "CACHE_TIER")
_AXIS_STEP = 0.5


def warmup(
    clips: Annotated[
        Path, typer.Option(help="Folder of .npz files with frames and controls.")
    ] = Path("client_examples/clips"),
    url: Annotated[str, typer.Option(help="gRPC address of the server.")] = "127.0.0.1:8001",
    every: Annotated[int, typer.Option(min=1, help="Frames between two presents.")] = 8,
    horizon: Annotated[int, typer.Option(min=1, help="Predicted frames.")] = 8,
    pause_s: Annotated[
        float, typer.Option(min=0.0, help="Thinking time after each, for scores and prefetch.")
    ] = 0.5,
    tenant: Annotated[str, typer.Option(help="Whose cache is filled.")] = "",
    tls_ca: Annotated[Path | None, typer.Option(help="PEM of the server's CA: use TLS.")] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="PEM certificate, mutual TLS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its PEM key.")] = None,
    access_key_file: Annotated[
        Path | None, typer.Option(help="File, mode 0600, of the server's access key.")
    ] = None,
) -> None:
    """Show each clip to the server and ask, at every few frames, what a hand is likely to ask."""
    import tritonclient.grpc as triton
    from rich.progress import track
    from tritonclient.utils import InferenceServerException

    paths = sorted(clips.glob("*.npz"))
    if not paths:
        raise typer.BadParameter(f"no .npz files in {clips}", param_hint="--clips")
    given = {"tenant": tenant} if tenant else {}
    tiers: dict[str, int] = {}
    try:
        access = ClientAccess(tls_ca, tls_cert, tls_key, access_key_file)
        connection = dial(url, access)
    except ConfigError as error:
        raise SystemExit(str(error)) from None
    with connection as client:
        for path in paths:
            with np.load(path) as clip:
                asked = list(interactions(clip["frames"], clip["controls"], every))
            session = f"warmup-{path.stem}-{time.time_ns()}"
            for i, arrays in enumerate(track(asked, description=path.stem)):
                arrays["HORIZON"] = np.array([horizon], np.int32)
                try:
                    reply = client.infer(
                        "world_model",
                        [_tensor(triton, name, array) for name, array in arrays.items()],
                        outputs=[triton.InferRequestedOutput(name) for name in _OUTPUTS],
                        sequence_id=session,
                        sequence_start=i == 0,
                        sequence_end=i + 1 == len(asked),
                        parameters=given,
                    )
                except InferenceServerException as error:
                    raise SystemExit(f"{path.name}: {error.message()}") from error
                tier = reply.as_numpy("CACHE_TIER")[0].decode()
                tiers[tier] = tiers.get(tier, 0) + 1
                time.sleep(pause_s)
    known = ", ".join(f"{n} {tier}" for tier, n in sorted(tiers.items()) if tier != "none")
    typer.echo(f"{tiers.get('none', 0)} answers computed; already there: {known or 'none'}")


def interactions(
    frames: NDArray[np.uint8], controls: NDArray[np.float32], every: int
) -> Iterator[dict[str, NDArray[Any]]]:
    """Inputs of one request after the other: at every `every` frames of the clip, its own next
    control, none, and half a step along each axis; the frames come with the first of them."""
    shown = 0
    for present in range(every - 1, len(controls), every):
        own = controls[present]
        still = np.zeros_like(own)
        still[3:] = own[3:]  # the grip stays as it is
        steps = _AXIS_STEP * np.eye(len(own), dtype=np.float32)[:3]
        for number, control in enumerate([own, still, *(still + steps), *(still - steps)]):
            if number:
                yield {"CONTROL": control[None]}
                continue
            # What led from frame to frame, and then what is asked.
            before = controls[max(shown - 1, 0) : present]
            new = frames[shown : present + 1]
            yield {"CONTROL": np.concatenate((before, control[None])), "FRAMES": new}
        shown = present + 1


def _tensor(triton: Any, name: str, array: NDArray[Any]) -> Any:
    from tritonclient.utils import np_to_triton_dtype

    array = np.ascontiguousarray(array)
    tensor = triton.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array)
    return tensor
