"""Arguments that a program gets and no process list shows."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from worldserve.concealed import start_concealed

SECRETS = ("--key=first secret", "--other=second secret")
TELL = (
    "import os, subprocess, sys;"
    "print(sys.argv[1:]); print([n for n in os.environ if 'CTRLCACHE_ARG' in n]);"
    "print(open('/proc/self/cmdline').read().split(chr(0))[-3:-1]);"
    "print('secret' in subprocess.run(['env'], capture_output=True, text=True).stdout);"
    "sys.stdin.read()"
)


def test_the_program_reads_what_nobody_else_does():
    """It sees the true arguments, at once and in order; its command line shows none, to it or to
    anyone; its children inherit none."""
    start = partial(
        subprocess.Popen, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    command = [sys.executable, "-c", TELL, "--open=1"]
    process = start_concealed(command, SECRETS, os.environ, start)
    shown = Path(f"/proc/{process.pid}/cmdline").read_bytes()
    assert not any(secret.encode() in shown for secret in SECRETS)
    assert b"--open=1" in shown
    out, _ = process.communicate(b"", timeout=30)
    assert process.returncode == 0
    assert out.decode().splitlines() == [
        str(["--open=1", *SECRETS]),
        "[]",
        "['***', '***']",
        "False",
    ]


def test_without_secrets_it_is_an_ordinary_start():
    """Nothing is added."""
    start = partial(subprocess.Popen, stdout=subprocess.PIPE)
    process = start_concealed([sys.executable, "-c", "print(1)"], (), os.environ, start)
    assert process.communicate(timeout=30)[0] == b"1\n"


def _children() -> set[str]:
    """Pids of this process's children; other tests have some, too."""
    tasks = Path("/proc/self/task").glob("*/children")
    return {pid for task in tasks for pid in task.read_text().split()}


def test_a_program_that_is_not_there():
    """The same error as without secrets, and no process is left."""
    before = _children()
    with pytest.raises(FileNotFoundError):
        start_concealed(["/nowhere/server"], SECRETS, os.environ)
    assert _children() <= before
