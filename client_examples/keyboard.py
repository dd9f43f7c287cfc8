"""Drive a session from the keyboard; the dream is drawn in the terminal with half blocks.

    python keyboard.py --url 127.0.0.1:8001

Arrows move the hand, w/s lift and lower it, space opens and closes it, . waits, z undoes, q quits.
Needs tritonclient[grpc], numpy and a terminal with 24-bit colour, nothing of this project. Copy it.
"""

import argparse
import contextlib
import os
import re
import termios
import time
import tty
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton
from tritonclient.utils import np_to_triton_dtype

RIGHT, AWAY, UP = np.array([(0.3, 0.5, 0), (-0.5, 0.3, 0), (0, 0, 0.5)])  # as the camera sees it
MOVES = {"\x1b[C": RIGHT, "\x1b[D": -RIGHT, "\x1b[A": AWAY, "\x1b[B": -AWAY, "w": UP, "s": -UP,
         " ": 0 * UP, ".": 0 * UP}  # fmt: skip


def ask(client, session, output, arrays, start=False, end=False, **parameters):
    inputs = []
    for name, array in arrays.items():
        inputs.append(triton.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)))
        inputs[-1].set_data_from_numpy(array)
    wanted = [triton.InferRequestedOutput(output)]
    answer = client.infer("world_model", inputs, outputs=wanted, parameters=parameters,
                          sequence_id=session, sequence_start=start, sequence_end=end)  # fmt: skip
    return answer.as_numpy(output)


def draw(frame, caption):  # two pixels a character: the upper is its colour, the lower its ground
    for upper, lower in zip(frame[::2], frame[1::2], strict=True):
        for above, below in zip(upper, lower, strict=True):
            print("\x1b[38;2;{};{};{};48;2;{};{};{}m▀".format(*above, *below), end="")
        print("\x1b[0m")
    print(f"\x1b[2K{caption}", end="\x1b[H", flush=True)  # home: the next frame goes over this one


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="127.0.0.1:8001")
    parser.add_argument("--clip", default=Path(__file__).parent / "clips" / "drawer-open.npz")
    args = parser.parse_args()
    clip, session, grip = np.load(args.clip), f"keyboard-{time.time_ns()}", 1.0
    frames, wait = list(clip["frames"][:16]), np.array([[0, 0, 0, grip]], np.float32)
    with triton.InferenceServerClient(args.url) as client, contextlib.ExitStack() as stack:
        if os.isatty(0):  # one by one and unechoed; piped keys come as they are
            stack.callback(termios.tcsetattr, 0, termios.TCSADRAIN, termios.tcgetattr(0))
            tty.setcbreak(0)
        seen = {"FRAMES": np.stack(frames), "CONTROL": np.r_[clip["controls"][:15], wait]}
        ask(client, session, "EXACT", seen, start=True, prompt=str(clip["prompt"]))
        stack.callback(ask, client, session, "EXACT", {"CONTROL": wait}, end=True)
        draw(frames[-1], "\x1b[Jarrows w s space . z q")
        while "q" not in (burst := re.findall(r"\x1b\[.|\s|.", os.read(0, 24).decode()) or "q"):
            plan, began = [], time.perf_counter()  # what was typed meanwhile becomes one plan
            for key in burst[:8]:
                grip = -grip if key == " " else grip
                plan += [[*MOVES[key], grip]] if key in MOVES else []
            if plan:
                given = {"CONTROL": np.float32(plan), "HORIZON": np.int32([len(plan)])}
                frames += list(ask(client, session, "PREDICTED_FRAMES", given, mode="advance"))
            if "z" in burst and len(frames) > 1:
                frames.pop()
                ask(client, session, "EXACT", {"CONTROL": wait}, mode="seek", frame=len(frames) - 1)
            took = (time.perf_counter() - began) * 1e3
            for frame in frames[-max(1, len(plan)) :]:
                draw(frame, f"frame {len(frames) - 1} after {took:.0f} ms")
        print("\x1b[34B")


if __name__ == "__main__":
    main()
