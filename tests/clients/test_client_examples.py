"""Every client example, run as its reader runs it, against the real server."""

from __future__ import annotations

import ast
import itertools
import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageSequence

EXAMPLES = Path(__file__).resolve().parents[2] / "client_examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
ALLOWED = {"tritonclient", "numpy", "PIL"}


def run(name: str, *arguments: str, keys: str = "") -> str:
    """What the example printed; it must end well."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments],
        input=keys,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_example_is_short_and_stands_alone(script):
    """Under 80 lines, and no import but tritonclient, numpy, pillow and the standard library."""
    text = script.read_text()
    assert len(text.splitlines()) < 80
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(str(node.module).split(".")[0])
    assert imported <= ALLOWED | set(sys.stdlib_module_names)


@pytest.mark.server
def test_grpc_client_asks_what_if_and_moves_on(server):
    """Seven directions are answered, and pushing along an axis moves the gripper along it."""
    text = run("grpc_client.py", "--url", server.endpoints.grpc)
    found = re.findall(r"^ *(\S+): .*\(([^)]*)\) cm +(hot|warm|cold|none) +[\d.]+ ms$", text, re.M)
    places = {way: np.array(place.split(","), float) for way, place, _ in found}
    assert set(places) == {"hold", "+x", "-x", "+y", "-y", "+z", "-z"}
    for axis, name in enumerate("xyz"):
        assert places[f"+{name}"][axis] > places[f"-{name}"][axis]
    assert "(8, 64, 64, 3)" in text


@pytest.mark.server
def test_http_client_streams_png_frames(server):
    """One answer per frame, with the gripper within reach of where it really went."""
    text = run("http_client.py", "--url", server.endpoints.http, "--steps", "6")
    lines = re.findall(r"^frame +\d+: .*?\[(.*?)\] cm, in truth \[(.*?)\]", text, re.M)
    assert len(lines) == 6
    errors = [
        np.linalg.norm(np.subtract(*(np.array(place.split(), float) for place in line)))
        for line in lines
    ]
    assert np.mean(errors) < 15


@pytest.mark.server
def test_asyncio_client_runs_two_sessions_at_once(server):
    """Both sessions finish, and their answers come in turns, not one session after the other."""
    text = run("asyncio_client.py", "--url", server.endpoints.grpc, "--steps", "8")
    order = re.findall(r"^ *(door-open|coffee-pull) +\d+: \(8, 256\)", text, re.M)
    assert order.count("door-open") == order.count("coffee-pull") == 8
    changes = sum(one != other for one, other in itertools.pairwise(order))
    assert changes >= 4
    assert text.count("median") == 2


@pytest.mark.server
def test_gif_client_writes_a_film(server, tmp_path):
    """The frames seen and those dreamed are all there, and the dream is no still picture."""
    out = tmp_path / "dream.gif"
    run("gif_client.py", "--url", server.endpoints.grpc, "--steps", "12", "--out", str(out))
    with Image.open(out) as film:
        frames = [np.asarray(f.convert("RGB"), np.int16) for f in ImageSequence.Iterator(film)]
    assert len(frames) == 16 + 12
    assert frames[0].shape == (64 * 4, (64 + 2 + 64) * 4, 3)
    right = [frame[:, -64 * 4 :] for frame in frames]
    assert np.abs(right[-1] - right[15]).mean() > 1


@pytest.mark.server
def test_keyboard_client_takes_piped_keys(server):
    """Eight keys are eight frames on; the half blocks show the clip's own frame, pixel by pixel."""
    text = run("keyboard.py", "--url", server.endpoints.grpc, keys="\x1b[C\x1b[A w.\x1b[D\x1b[Bs")
    assert "frame 23 after" in text  # 0 to 15 were shown
    cells = re.findall(r"\x1b\[38;2;(\d+);(\d+);(\d+);48;2;(\d+);(\d+);(\d+)m▀", text)
    assert len(cells) == 64 * 32 * (1 + 8)
    shown = np.array(cells[: 64 * 32], np.uint8).reshape(32, 64, 2, 3)  # upper, lower
    with np.load(EXAMPLES / "clips" / "drawer-open.npz") as clip:
        assert np.array_equal(shown.transpose(0, 2, 1, 3).reshape(64, 64, 3), clip["frames"][15])


@pytest.mark.server
def test_keyboard_client_drives_from_a_terminal_and_leaves_it_as_it_was(server):
    """Keys go one by one, z takes a step back, q quits; echo and line mode are restored."""
    master, terminal = pty.openpty()
    before = termios.tcgetattr(terminal)
    process = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "keyboard.py"), "--url", server.endpoints.grpc],
        stdin=terminal,
        stdout=terminal,
        stderr=subprocess.STDOUT,
    )
    try:
        _wait_for(master, "arrows")
        for keys, answer in (
            ("\x1b[C", "frame 16 after"),
            ("w", "frame 17 after"),
            ("z", "frame 16 after"),
        ):
            os.write(master, keys.encode())
            _wait_for(master, answer)
        os.write(master, b"q")
        _drain(master, process)
        assert process.returncode == 0
        assert termios.tcgetattr(terminal) == before
    finally:
        process.kill()
        process.wait()
        os.close(master)
        os.close(terminal)


def _wait_for(master: int, text: str, timeout_s: float = 60) -> None:
    """Read the terminal until `text` is on it, and no traceback."""
    seen, deadline = b"", time.monotonic() + timeout_s
    while text.encode() not in seen:
        assert time.monotonic() < deadline, seen[-500:]
        assert b"Traceback" not in seen, seen[-500:]
        if select.select([master], [], [], 0.2)[0]:
            seen += os.read(master, 65536)


def _drain(master: int, process: subprocess.Popen[bytes], timeout_s: float = 30) -> None:
    """Read on until the process has ended: a full terminal would hold it up."""
    deadline = time.monotonic() + timeout_s
    while process.poll() is None and time.monotonic() < deadline:
        if select.select([master], [], [], 0.1)[0]:
            os.read(master, 65536)


@pytest.mark.server
def test_python_of_the_readme_runs_as_printed(server):
    """The lines that a reader tries first work, but for the port, and give what they say."""
    readme = (EXAMPLES.parent / "README.md").read_text()
    [code] = re.findall(r"```python\n(.*?)```", readme, re.S)
    assert len(code.splitlines()) <= 15
    done = subprocess.run(
        [sys.executable, "-c", code.replace("127.0.0.1:8001", server.endpoints.grpc)],
        cwd=EXAMPLES.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("(8, 64, 64, 3)\n")
