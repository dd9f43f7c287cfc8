"""The demo against the real server: as a function, and as the program that `make demo` starts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tritonclient.grpc as grpcclient
from PIL import Image
from rich.console import Console

from worldserve import demo, processes
from worldserve.demo import PRESENTS
from worldserve.demo_checks import Played, summarise
from worldserve.demo_pictures import film, sheet
from worldserve.demo_script import load_scene

PROJECT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.server


@pytest.fixture
def play(server, tmp_path):
    """Play a clip with a budget of state error; (what was played, the table as text)."""

    def played(name: str, max_error: float) -> tuple[Played, str]:
        scene = load_scene(PROJECT / "client_examples" / "clips" / f"{name}.npz", PRESENTS[name])
        with (tmp_path / "table").open("w") as file:
            console = Console(file=file, width=130)
            with grpcclient.InferenceServerClient(server.endpoints.grpc) as client:
                made = demo.play(client, scene, 0.1, max_error, console)
        return made, (tmp_path / "table").read_text()

    return played


def test_exact_scene_is_played_without_a_fault(server, play, tmp_path):
    """Without a budget all is exact, what is asked again is a hit, pictures are made."""
    played, table = play("drawer-open", 0.0)
    summary = summarise([played], demo.state_scale(server.config.model_repository))
    assert summary.faults == ()
    assert summary.exact == summary.exact_same == len(played.steps)
    repeats = [s.cached for s in played.steps if s.interaction.kind in ("repeat", "scrub")]
    assert [answer.tier for answer in repeats] == ["hot"] * len(repeats)
    assert summary.encode_second_ms[0] < summary.encode_first_ms[0]
    assert len(re.findall(r"^ *\d+ .*×", table, re.M)) == len(played.steps)

    sheet(played, tmp_path / "sheet.png")
    film(played, tmp_path / "film.gif")
    with Image.open(tmp_path / "sheet.png") as image:
        assert image.width > 9 * 128
        assert image.height > 4 * 128
    with Image.open(tmp_path / "film.gif") as image:
        assert image.n_frames == 10 + 16


def test_approximate_scene_keeps_its_bounds_and_its_memory(server, play):
    """With a budget some answers are approximate, within their bounds; the memory is exact."""
    played, _ = play("coffee-pull", 0.05)
    summary = summarise([played], demo.state_scale(server.config.model_repository))
    assert summary.faults == ()
    assert summary.errors
    assert max(summary.bounds) <= 0.05


@pytest.mark.timeout(900)
def test_program_ends_well_keeps_the_server_and_leaves_no_trace(tmp_path):
    """With KEEP=1 it prints a line to paste and waits; told to stop, nothing is left."""
    output = tmp_path / "output"
    command = [sys.executable, "-m", "worldserve.demo", "--only", "door-open", "--pause", "0"]
    with output.open("w") as file:
        process = subprocess.Popen(
            [*command, "--out", str(tmp_path / "pictures")],
            cwd=PROJECT,
            env={**os.environ, "KEEP": "1"},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + 800
        while "keyboard.py --url" not in output.read_text():
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.2)
        [url] = re.findall(r"keyboard.py --url (\S+)", output.read_text())
        with grpcclient.InferenceServerClient(url) as client:
            assert client.is_model_ready("world_model")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, output.read_text()
    finally:
        process.kill()
        process.wait()
    left = list(processes.SHM.glob(f"ctrlcache-{process.pid}-*"))
    assert left == []
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {
        "door-open.png",
        "door-open.gif",
        "latency.png",
    }


def test_program_fails_where_the_server_does_not_come_up(tmp_path):
    """A repository without weights: status 1, and the reason on the screen."""
    repository = tmp_path / "repository"
    (repository / "world_model" / "1").mkdir(parents=True)
    source = PROJECT / "model_repository" / "world_model"
    (repository / "world_model" / "config.pbtxt").write_bytes(
        (source / "config.pbtxt").read_bytes()
    )
    (repository / "world_model" / "1" / "model.py").write_bytes(
        (source / "1" / "model.py").read_bytes()
    )
    done = subprocess.run(
        [sys.executable, "-m", "worldserve.demo", "--repository", str(repository)],
        cwd=PROJECT,
        env={**os.environ, "TMPDIR": str(tmp_path)},  # a failed run keeps its logs there
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 1
    assert "could not start" in done.stdout
    assert "config.json" in done.stdout
