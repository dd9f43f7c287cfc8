"""Memory that was freed goes back to the system."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

#: Many small arrays, of which few survive: those keep the heap from shrinking by itself.
SCRIPT = """
import re
import numpy as np
from worldserve.memory import give_back

def held_mb():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

arrays = [np.ones(8_000) for _ in range(4_000)]
full = held_mb()
arrays = arrays[::100]
freed = held_mb()
give_back()
print(full, freed, held_mb())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
def test_freed_memory_goes_back():
    """256 MB in pieces, of which a hundredth stays in use."""
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, check=True, text=True)
    full, freed, after = map(float, run.stdout.split())
    assert full - freed < 100  # else nothing is shown here
    assert full - after > 200
