"""Prints Triton's hash of every function of `kernels/*/triton`, twice; the order changes nothing.

Run by `test_compile_ahead.py` in a process of its own, of which each order has a fork. A line with
kernels first, and one with functions first.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

from triton.runtime.jit import JITFunction

from slipstream import kernels

found = {}
folder = next(iter(kernels.__path__))
for path in sorted(Path(folder).glob("*/triton/*.py")):
    parts = path.relative_to(folder).with_suffix("").parts
    namespace = vars(importlib.import_module(".".join(("slipstream.kernels", *parts))))
    found |= {
        f"{path.stem}.{name}": value
        for name, value in namespace.items()
        if isinstance(value, JITFunction)
    }
for kernels_last in (False, True):
    fork = os.fork()
    if fork == 0:
        order = sorted(found, key=lambda name: (name.endswith("_kernel") is kernels_last, name))
        print(json.dumps({name: found[name].cache_key for name in order}), flush=True)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
    if status:
        sys.exit(status)
