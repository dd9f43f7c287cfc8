"""One session over HTTP, with frames as PNG, as a camera or a headset sends them.

    python http_client.py --url 127.0.0.1:8000

Needs tritonclient[http], numpy and pillow, nothing of this project. Copy it.
"""

import argparse
import io
import uuid
from pathlib import Path

import numpy as np
import tritonclient.http as triton
from PIL import Image
from tritonclient.utils import np_to_triton_dtype


def encode(frame):
    """(h, w, 3) uint8 -> PNG; JPEG is understood too."""
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "PNG")
    return file.getvalue()


def tensor(name, array):
    made = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    made.set_data_from_numpy(array)
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="127.0.0.1:8000")
    parser.add_argument("--clip", default=Path(__file__).parent / "clips" / "coffee-pull.npz")
    parser.add_argument("--steps", type=int, default=12, help="frames to send, one by one")
    args = parser.parse_args()
    clip = np.load(args.clip)
    session = uuid.uuid4().hex

    with triton.InferenceServerClient(args.url) as client:
        for t in range(args.steps):
            # Sample t - 1 led to this frame, sample t leads on: the answer is the near future.
            samples = clip["controls"][max(t - 1, 0) : t + 1]
            images = np.array([encode(clip["frames"][t])], np.object_)
            wanted = ["PHYSICS", "CONFIDENCE", "TIMING_MS"]
            answer = client.infer(
                "world_model",
                [tensor("CONTROL", samples), tensor("FRAMES_ENCODED", images),
                 tensor("HORIZON", np.array([4], np.int32))],
                outputs=[triton.InferRequestedOutput(name) for name in wanted],
                sequence_id=session,
                sequence_start=t == 0,
                sequence_end=t == args.steps - 1,
                parameters={"prompt": str(clip["prompt"])} if t == 0 else None,
            )  # fmt: skip
            predicted = answer.as_numpy("PHYSICS")[-1, :3] * 100
            true = clip["physics"][t + 4, :3] * 100
            print(f"frame {t:2}: gripper in 0.4 s {predicted.round(1)} cm, in truth {true.round(1)}"
                  f"  confidence {answer.as_numpy('CONFIDENCE')[0]:.2f}"
                  f"  {answer.as_numpy('TIMING_MS')[-1]:.1f} ms on the server")  # fmt: skip


if __name__ == "__main__":
    main()
