"""Runs scripts of this folder in forks of one process that has imported torch and Triton.

`test_compile_ahead.py` starts it without TRITON_INTERPRET, because Triton decides at import whether
it compiles or interprets. A fork spares each script the imports, which take seconds, and the hash
of Triton's own files. Each line of standard input is a JSON object with the script, its arguments
and additions to its environment; each line of standard output is one with the exit code, output and
errors of the script.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any, NoReturn

import torch._dynamo  # noqa: F401  operations on meta tensors import it
from triton.runtime.cache import triton_key

import slipstream.runner.startup.dry_start  # noqa: F401

FOLDER = Path(__file__).parent


def run_fork(request: dict[str, Any], files: tuple[int, int]) -> NoReturn:
    """Become the script: its output goes to `files`, and nothing is left of the server's input."""
    code = 1
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        for target, file in zip((1, 2), files, strict=True):
            os.dup2(file, target)
        os.environ.update(request["environment"])
        sys.argv = [str(FOLDER / request["script"]), *request["arguments"]]
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run a script in a fork and wait for its end."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        fork = os.fork()
        if fork == 0:
            run_fork(request, (out.fileno(), errors.fileno()))
        code = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
        texts = {}
        for name, file in (("output", out), ("errors", errors)):
            file.seek(0)
            texts[name] = file.read()
    return {"code": code, **texts}


if __name__ == "__main__":
    triton_key()
    gc.freeze()  # captures of graphs collect garbage, among which none of the imports is
    # Triton's compiler makes so many objects that their collection took a seventh of its time, and
    # a fork soon ends.
    gc.disable()
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)
