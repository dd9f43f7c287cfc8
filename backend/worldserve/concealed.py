"""Start a program with arguments that no process list shows.

tritonserver takes its access keys as arguments and nothing else, and the arguments of a process can
be read by every user of the machine. So the program is started with words that tell nothing, while
the true arguments come in its environment, which only its owner can read. The kernel stops it
before its first instruction, and there the pointers of its argument vector are turned to the true
ones; what the kernel shows is not the vector but the memory it was first made in.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import struct
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

__all__ = ["ConcealmentRefused", "start_concealed"]

_VARIABLE = "CTRLCACHE_ARGUMENT_"
_TRACEME, _DETACH = 0, 17
_WORD = struct.Struct("=Q")


class ConcealmentRefused(Exception):
    """This machine does not let a process look after its own child (ptrace)."""


def start_concealed(
    command: Sequence[str],
    concealed: Sequence[str],
    environment: Mapping[str, str],
    start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen,
) -> subprocess.Popen[bytes]:
    """Start `command` with the arguments `concealed` after its own; process lists show "***".

    start: takes the command, `env` and `preexec_fn` as subprocess.Popen does. Linux on 64 bits.
    ConcealmentRefused where ptrace is not allowed: nothing was started.
    """
    variables = {f"{_VARIABLE}{n}": text for n, text in enumerate(concealed)}
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.restype = ctypes.c_long
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]

    def trace_me() -> None:
        if libc.ptrace(_TRACEME, 0, None, None) != 0:
            raise OSError(ctypes.get_errno(), "ptrace")

    try:
        process = start(
            [*command, *("***" for _ in concealed)],
            env={**environment, **variables},
            preexec_fn=trace_me,
        )
    except subprocess.SubprocessError as error:
        raise ConcealmentRefused(str(error)) from None
    try:
        _, status = os.waitpid(process.pid, 0)
        if not os.WIFSTOPPED(status):
            raise ConcealmentRefused(f"the program ended at once (status {status})")
        with open(f"/proc/{process.pid}/mem", "rb+", buffering=0) as memory:
            _turn(memory, _stack(process.pid), len(command), len(concealed))
        if libc.ptrace(_DETACH, process.pid, None, None) != 0:
            raise OSError(ctypes.get_errno(), "ptrace")
    except (OSError, ConcealmentRefused) as error:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(process.pid, 0)
        process.returncode = -signal.SIGKILL
        raise ConcealmentRefused(str(error)) from None
    return process


def _stack(pid: int) -> int:
    """Where the stack of a program begins that has not run yet: at its argument count."""
    fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    address = int(fields[25])
    if not address:
        raise ConcealmentRefused("the stack's address is not shown")
    return address


def _turn(memory: BinaryIO, stack: int, shown: int, concealed: int) -> None:
    """Turn the last arguments to the variables, and what named the variables to another one."""
    arguments = stack + _WORD.size
    environment = arguments + _WORD.size * (shown + concealed + 1)
    if _word(memory, stack) != shown + concealed:
        raise ConcealmentRefused("the arguments are not where they should be")
    prefix = _VARIABLE.encode()
    turned = 0
    slots: list[int] = []
    harmless = None
    at = environment
    while address := _word(memory, at):
        name, _, _ = _text(memory, address, 64).partition(b"=")
        if name.startswith(prefix):
            number = int(name[len(prefix) :])
            place = arguments + _WORD.size * (shown + number)
            _write(memory, place, address + len(name) + 1)
            slots.append(at)
            turned += 1
        elif harmless is None:
            harmless = address
        at += _WORD.size
    if turned != concealed or harmless is None:
        raise ConcealmentRefused("the environment is not where it should be")
    for slot in slots:
        # A variable twice does no harm; children do not inherit what is not there.
        _write(memory, slot, harmless)


def _word(memory: BinaryIO, address: int) -> int:
    memory.seek(address)
    (value,) = _WORD.unpack(memory.read(_WORD.size))
    return int(value)


def _write(memory: BinaryIO, address: int, value: int) -> None:
    memory.seek(address)
    memory.write(_WORD.pack(value))


def _text(memory: BinaryIO, address: int, most: int) -> bytes:
    memory.seek(address)
    # The environment ends close to the end of memory: a short read is no fault.
    return memory.read(most).partition(b"\0")[0]
