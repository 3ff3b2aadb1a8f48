"""Every Triton kernel compiles for an H100 (sm_90a) and fits its shared memory; no GPU needed."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "lab"
KERNELS = FOLDER.parents[1] / "kernels"


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("forms", [(), pytest.param(("all",), marks=pytest.mark.slow)], ids=str)
def test_every_kernel_compiles_for_sm_90a(forms: tuple[str, ...]) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["SLIPSTREAM_PDL"] = "1"  # each kernel with dependent launch
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    compiled: set[str] = set()
    for script, *arguments in (("compile_sm90.py", *forms), ("compile_linear.py",)):
        result = subprocess.run(
            [sys.executable, str(FOLDER / script), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=280,
        )
        assert result.returncode == 0, result.stderr[-2000:]
        compiled |= {line.split()[0] for line in result.stdout.splitlines()}
    launched = {
        name
        for path in KERNELS.glob("*/triton/*.py")
        for name in re.findall(r"^\s*(_\w+_kernel)\[", path.read_text(), re.MULTILINE)
    }
    assert len(launched) >= 10
    assert compiled == launched
