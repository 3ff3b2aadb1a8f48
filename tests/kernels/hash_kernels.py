"""Prints Triton's hash of every function of `kernels/triton`; which come first changes nothing.

Run by `test_compile_ahead.py` in processes of their own: `hash_kernels.py kernels|functions`.
"""

from __future__ import annotations

import importlib
import json
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
kernels_last = sys.argv[1] == "functions"
order = sorted(found, key=lambda name: (name.endswith("_kernel") is kernels_last, name))
print(json.dumps({name: found[name].cache_key for name in order}))
