"""Runs a command with a time limit: within.py SECONDS LOG COMMAND...

Output goes to LOG. At the limit every process of the command gets SIGABRT, at which Python writes
the traceback of each thread to LOG, and is killed four seconds later. Prints one line, and exits
with the command's status, or 124 at the limit.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

_LAST_WORDS_SECONDS = 4.0


def end(process: subprocess.Popen[bytes]) -> None:
    """Ask the command and all that it has started for tracebacks, then kill them."""
    own = psutil.Process(process.pid)
    every = [*own.children(recursive=True), own]
    for one in every:
        try:
            one.send_signal(signal.SIGABRT)
        except psutil.NoSuchProcess:
            pass
    _, alive = psutil.wait_procs(every, _LAST_WORDS_SECONDS)
    for one in alive:
        one.kill()


def main() -> int:
    limit, log, *command = sys.argv[1:]
    began = time.monotonic()
    with Path(log).open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"},
        )
        try:
            status = process.wait(float(limit))
        except subprocess.TimeoutExpired:
            end(process)
            process.wait()
            status = 124
    lines = Path(log).read_text(errors="replace").splitlines()
    last = next((line for line in reversed(lines) if line.strip()), "nothing was written")
    print(f"exit {status}, {time.monotonic() - began:.0f} s: {last}", flush=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
