"""One session over gRPC: show the model a clip, ask "what if" for each axis, move on.

    python grpc_client.py --url 127.0.0.1:8001

Needs tritonclient[grpc] and numpy, nothing of this project. Copy it.
"""

import argparse
import time
import uuid
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import np_to_triton_dtype

WAYS = {"hold": (0, 0, 0), "+x": (1, 0, 0), "-x": (-1, 0, 0), "+y": (0, 1, 0),
        "-y": (0, -1, 0), "+z": (0, 0, 1), "-z": (0, 0, -1)}  # fmt: skip


class Session:
    """One video and its history on the server, known there by `id`."""

    def __init__(self, client, model="world_model", **parameters):
        self.client, self.model, self.id = client, model, uuid.uuid4().hex
        self.start, self.parameters = True, parameters  # parameters of the first request

    def ask(self, control, outputs, frames=None, horizon=8, end=False, **parameters):
        """control (K, 4), oldest sample first; frames (T, h, w, 3): new ones -> {output: array}."""
        arrays = {"CONTROL": np.atleast_2d(np.asarray(control, np.float32))}
        arrays["HORIZON"] = np.array([horizon], np.int32)
        if frames is not None:
            arrays["FRAMES"] = np.ascontiguousarray(frames)
        inputs = []
        for name, array in arrays.items():
            inputs.append(triton.InferInput(name, array.shape, np_to_triton_dtype(array.dtype)))
            inputs[-1].set_data_from_numpy(array)
        answer = self.client.infer(
            self.model,
            inputs,
            outputs=[triton.InferRequestedOutput(name) for name in outputs],
            sequence_id=self.id,
            sequence_start=self.start,
            sequence_end=end,
            parameters={**self.parameters, **parameters},
        )
        self.start, self.parameters = False, {}
        return {name: answer.as_numpy(name) for name in outputs}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="127.0.0.1:8001")
    parser.add_argument("--clip", default=Path(__file__).parent / "clips" / "drawer-open.npz")
    parser.add_argument("--context", type=int, default=16, help="frames to show the model")
    args = parser.parse_args()
    clip = np.load(args.clip)
    frames, controls = clip["frames"][: args.context], clip["controls"][: args.context - 1]

    with triton.InferenceServerClient(args.url) as client:
        session = Session(client, prompt=str(clip["prompt"]))
        grip = controls[-1, 3]
        report = ["PHYSICS", "CACHE_TIER", "EXACT", "ERROR_BOUND"]
        for way, direction in WAYS.items():
            plan = np.array([[*direction, grip]]) * (0.5, 0.5, 0.5, 1)
            began = time.perf_counter()
            # The first request brings the frames, and the controls that led from one to the next.
            control = np.concatenate((controls, plan)) if session.start else plan
            got = session.ask(control, report, frames if session.start else None, max_error=0.05)
            took = (time.perf_counter() - began) * 1e3
            x, y, z = got["PHYSICS"][-1, :3] * 100
            print(f"{way:>6}: in 0.8 s the gripper is at ({x:5.1f}, {y:5.1f}, {z:5.1f}) cm"
                  f"  {got['CACHE_TIER'][0].decode():>4}  {took:6.1f} ms")  # fmt: skip
        got = session.ask(plan, ["PREDICTED_FRAMES"], mode="advance", end=True)
        print("went down four steps; predicted frames:", got["PREDICTED_FRAMES"].shape)


if __name__ == "__main__":
    main()
