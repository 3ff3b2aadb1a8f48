"""Disables the compilation of kernels ahead of each start, because GPU tests start many engines.

`test_startup_cuda.py` enables it for its own tests.
"""

from __future__ import annotations

import os

os.environ.setdefault("SLIPSTREAM_COMPILE_AHEAD", "0")
