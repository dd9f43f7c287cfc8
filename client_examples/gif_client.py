"""Write a GIF of a dream: the model sees a few frames, then goes on alone under the controls.

    python gif_client.py --url 127.0.0.1:8001 --out dream.gif

Left what really happened, right what the model dreamed. Needs tritonclient[grpc], numpy and
pillow, nothing of this project. Copy it.
"""

import argparse
import uuid
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton
from PIL import Image
from tritonclient.utils import np_to_triton_dtype


def tensor(name, array):
    made = triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    made.set_data_from_numpy(array)
    return made


def dream(client, clip, context, steps, chunk=8):
    """Advance `steps` frames beyond the first `context` of the clip -> (steps, h, w, 3) uint8."""
    session, made = uuid.uuid4().hex, []
    for t in range(context - 1, context - 1 + steps, chunk):
        first = t == context - 1
        stop = min(t + chunk, context - 1 + steps)
        # All samples of the plan are committed: the session moves on by as many frames.
        inputs = [tensor("CONTROL", clip["controls"][0 if first else t : stop]),
                  tensor("HORIZON", np.array([stop - t], np.int32))]  # fmt: skip
        if first:
            inputs.append(tensor("FRAMES", clip["frames"][:context]))
        answer = client.infer(
            "world_model",
            inputs,
            outputs=[triton.InferRequestedOutput("PREDICTED_FRAMES")],
            sequence_id=session,
            sequence_start=first,
            sequence_end=stop == context - 1 + steps,
            parameters={"mode": "advance", "prompt": str(clip["prompt"])},
        )
        made.append(answer.as_numpy("PREDICTED_FRAMES"))
    return np.concatenate(made)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="127.0.0.1:8001")
    parser.add_argument("--clip", default=Path(__file__).parent / "clips" / "door-open.npz")
    parser.add_argument("--context", type=int, default=16, help="frames to show the model")
    parser.add_argument("--steps", type=int, default=24, help="frames to dream")
    parser.add_argument("--out", default="dream.gif")
    parser.add_argument("--scale", type=int, default=4)
    args = parser.parse_args()
    clip = dict(np.load(args.clip))
    with triton.InferenceServerClient(args.url) as client:
        dreamed = dream(client, clip, args.context, args.steps)
    true = clip["frames"][: args.context + len(dreamed)]
    seen = np.concatenate((clip["frames"][: args.context], dreamed))
    gap = np.full((*true.shape[:2], 2, 3), 255, np.uint8)
    gap[args.context :] = (255, 120, 0)  # from here on the model is alone
    film = np.concatenate((true, gap, seen), axis=2)
    size = (film.shape[2] * args.scale, film.shape[1] * args.scale)
    images = [Image.fromarray(frame).resize(size, Image.Resampling.NEAREST) for frame in film]
    images[0].save(args.out, save_all=True, append_images=images[1:], duration=100, loop=0)
    print(f"{args.out}: {args.context} frames seen, {len(dreamed)} dreamed")


if __name__ == "__main__":
    main()
