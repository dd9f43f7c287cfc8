"""Two sessions at once over asyncio gRPC, each a person dragging at a scene of his own.

    python asyncio_client.py --url 127.0.0.1:8001

Needs tritonclient[grpc] and numpy, nothing of this project. Copy it.
"""

import argparse
import asyncio
import time
import uuid
from pathlib import Path

import numpy as np
import tritonclient.grpc.aio as triton
from tritonclient.utils import np_to_triton_dtype

CLIPS = Path(__file__).parent / "clips"


def tensor(name, array):
    made = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    made.set_data_from_numpy(array)
    return made


async def drag(client, name, context, steps, pause_s):
    """Show the clip's first frames, then probe a control that glides; the latencies in ms."""
    clip = np.load(CLIPS / f"{name}.npz")
    session, took = uuid.uuid4().hex, []
    for step in range(steps):
        angle = step / 8
        control = np.array([[np.sin(angle), np.cos(angle), 0, 1]], np.float32) * np.float32(0.4)
        inputs = [tensor("HORIZON", np.array([8], np.int32))]
        if step == 0:
            control = np.concatenate((clip["controls"][: context - 1], control))
            inputs.append(tensor("FRAMES", clip["frames"][:context]))
        began = time.perf_counter()
        answer = await client.infer(
            "world_model",
            [*inputs, tensor("CONTROL", control)],
            outputs=[triton.InferRequestedOutput(n) for n in ("STATE", "CACHE_TIER", "EXACT")],
            sequence_id=session,
            sequence_start=step == 0,
            sequence_end=step == steps - 1,
            parameters={"prompt": str(clip["prompt"]), "max_error": 0.05},
        )
        took.append((time.perf_counter() - began) * 1e3)
        state, tier = answer.as_numpy("STATE"), answer.as_numpy("CACHE_TIER")[0].decode()
        kind = "exact" if answer.as_numpy("EXACT")[0] else "approximate"
        print(f"{name:>12} {step:3}: {state.shape} {kind:>11} {tier:>4} {took[-1]:7.1f} ms")
        await asyncio.sleep(pause_s)
    return took


async def run(args):
    async with triton.InferenceServerClient(args.url) as client:
        both = [drag(client, name, args.context, args.steps, args.pause)
                for name in ("door-open", "coffee-pull")]  # fmt: skip
        for took in await asyncio.gather(*both):
            print(f"median {np.median(took):.1f} ms, slowest {max(took):.1f} ms")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="127.0.0.1:8001")
    parser.add_argument("--context", type=int, default=16, help="frames to show the model")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--pause", type=float, default=0.1, help="seconds between interactions")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
