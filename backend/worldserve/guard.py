"""Outlives the launcher by a moment: where it was killed, removes what it can no longer remove.

Run as a script (`python -I -S guard.py <run id> <directory to remove or ''>`) with a pipe as
standard input that the launcher keeps open. A line means that the launcher has cleaned up itself;
the end of the pipe without one means that it died.
"""

from __future__ import annotations

import shutil
import signal
import sys
from pathlib import Path

if __name__ == "__main__":
    # Not in site-packages' view (-S starts in 10 ms): its neighbour is found by path.
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from processes import sweep  # type: ignore[import-not-found]

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    run_id, directory = sys.argv[1:3]
    if not sys.stdin.readline():
        sweep(run_id)
        if directory:
            shutil.rmtree(directory, ignore_errors=True)
