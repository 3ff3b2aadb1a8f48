"""Prints Triton's hashes of all functions in the folders `triton` of `kernels`, in two orders.

One line has kernels first and the other functions first; both should be equal.
`test_compile_ahead.py` runs it in a process of its own, which forks for each order.
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
for path in sorted(Path(folder).glob("**/triton/*.py")):
    parts = path.relative_to(folder).with_suffix("").parts
    namespace = vars(importlib.import_module(".".join(("slipstream.kernels", *parts))))
    found |= {
        f"{path.parent.parent.name}.{path.stem}.{name}": value
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
