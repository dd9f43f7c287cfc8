"""`ctrlcache calibrate`: devices from sample files, models through whoever provides them."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from ctrlcache.commands import calibrate
from ctrlcache.devices import DeviceCalibration, device_directory

run = CliRunner().invoke


def write(path: Path, samples: np.ndarray) -> str:
    np.savetxt(path, samples, delimiter=",", header="x,y")
    return str(path)


def test_device_is_saved_where_it_will_be_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From two sample files to a calibration that the server can load by name."""
    monkeypatch.setenv("CTRLCACHE_DEVICES", str(tmp_path / "devices"))
    rng = np.random.default_rng(0)
    rest = write(tmp_path / "rest.csv", 512 + rng.normal(0, 1, (100, 2)))
    sweep = tmp_path / "sweep.npy"
    np.save(sweep, rng.uniform(0, 1024, (4_000, 2)))
    done = run(calibrate.app, ["device", "stick", "--rest", rest, "--sweep", str(sweep)])
    assert done.exit_code == 0, done.output
    assert "device stick" in done.output
    device = DeviceCalibration.load(device_directory(), "stick", axes=2)
    np.testing.assert_allclose(device.apply([[512, 1024]]), [[0, 1]], atol=0.02)


@pytest.mark.parametrize(
    ("rest", "sweep", "text"),
    [
        ("absent.csv", "ok.csv", "absent.csv is not there"),
        ("bad.csv", "ok.csv", "is no table of numbers"),
        ("ok.csv", "ok.csv", "move every axis"),
    ],
)
def test_bad_samples_are_explained(tmp_path: Path, rest: str, sweep: str, text: str) -> None:
    """Errors go to the user as one line, with status 1 and nothing written."""
    write(tmp_path / "ok.csv", np.random.default_rng(0).normal(size=(50, 2)))
    (tmp_path / "bad.csv").write_text("1,2\nthree,4\n")
    arguments = ["device", "stick", "--directory", str(tmp_path / "devices")]
    arguments += ["--rest", str(tmp_path / rest), "--sweep", str(tmp_path / sweep)]
    done = run(calibrate.app, arguments)
    assert done.exit_code == 1
    assert text in " ".join(done.output.split())
    assert not (tmp_path / "devices").exists()


def announce(number: int = 3) -> None:
    """Stand-in for a provider's command: takes an option and prints it."""
    print(f"calibrating {number}")


def test_model_command_is_found_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options reach the provider's command; without one the error says what to install."""
    entry = EntryPoint("calibrate.model", f"{__name__}:announce", "ctrlcache.commands")
    monkeypatch.setattr(EntryPoint, "load", lambda self: announce)
    monkeypatch.setattr(calibrate, "entry_points", lambda group: EntryPoints([entry]))
    done = run(calibrate.app, ["model", "--number", "7"])
    assert done.exit_code == 0, done.output
    assert "calibrating 7" in done.output
    assert run(calibrate.app, ["model", "--number", "many"]).exit_code == 2
    monkeypatch.setattr(calibrate, "entry_points", lambda group: EntryPoints([]))
    done = run(calibrate.app, ["model"])
    assert done.exit_code == 1
    assert "ctrlcache[serve]" in done.output
