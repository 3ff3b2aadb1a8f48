"""Prints Triton's hash of every function of `kernels/triton`, twice; the order changes nothing.

Run by `test_compile_ahead.py` in a process of its own, of which each order has a fork. A line with
kernels first, and one with functions first.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import sys

from triton.runtime.jit import JITFunction

from slipstream import kernels

found = {}
for module in pkgutil.iter_modules([f"{path}/triton" for path in kernels.__path__]):
    namespace = vars(importlib.import_module(f"slipstream.kernels.triton.{module.name}"))
    found |= {
        f"{module.name}.{name}": value
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
