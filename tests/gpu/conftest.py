"""Tests on a GPU build hundreds of engines: each would go through its start beforehand.

`test_startup_cuda.py` turns that on for itself.
"""

from __future__ import annotations

import os

os.environ.setdefault("SLIPSTREAM_COMPILE_AHEAD", "0")
