"""Starts a script of this folder anew for each rank, for those that measure several GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

from slipstream.runner.parallel.rank_processes import devices_from


def run_ranks(script: str, size: int) -> int:
    """Run `script` with this process's arguments and `--rank R --rendezvous PATH` on each rank, and
    return the highest exit status; 1 if the ranks have not ended after 150 seconds."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, script, *sys.argv[1:], "--rank", str(rank)]
                + ["--rendezvous", f"{folder}/group"],
                env=os.environ | {"CUDA_VISIBLE_DEVICES": devices_from(rank, size)},
            )
            for rank in range(size)
        ]
        try:
            return max(process.wait(timeout=150) for process in ranks)
        except subprocess.TimeoutExpired:
            print("the ranks hang", flush=True)
            return 1
        finally:
            for process in ranks:
                process.kill()
