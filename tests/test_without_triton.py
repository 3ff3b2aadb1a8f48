"""Triton is optional: without it, every module but the Triton kernels can be imported."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROGRAM = """
import importlib, sys
from pathlib import Path

sys.modules["triton"] = None
import slipstream

root = Path(slipstream.__path__[0])
for folder in ("configs", "kernels", "speculators", "runner", "server"):
    for path in sorted((root / folder).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        is_kernel = "triton" in parts[:-1] and parts[0] == "kernels" or parts[-1] == "launch"
        if not is_kernel and not parts[-1].startswith("__"):
            importlib.import_module(".".join(("slipstream", *parts)))
print("all imported")
"""


def test_every_module_but_the_triton_kernels_imports_without_triton() -> None:
    path = f"import sys; sys.path[:0] = {sys.path!r}\n"
    result = subprocess.run(
        [sys.executable, "-P", "-c", path + PROGRAM], capture_output=True, text=True, timeout=120
    )
    assert result.stdout == "all imported\n", result.stderr


def test_only_the_dev_and_gpu_extras_require_triton() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [need for need in project["dependencies"] if need.startswith("triton")]
    extras = project["optional-dependencies"].items()
    found = [name for name, needs in extras if any(need.startswith("triton") for need in needs)]
    assert found == ["dev", "gpu"]


def test_the_pip_commands_in_the_readme_do_not_install_triton() -> None:
    """They must exclude it, because constraints.txt pins it and xgrammar depends on it."""
    pinned = (ROOT / "constraints.txt").read_text()
    commands = re.findall(r"^.*pip install.*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert commands and all("--no-deps" in command for command in commands)
    (command,) = [command for command in commands if "constraints.txt" in command]
    assert command.startswith("grep -v '^triton==' constraints.txt | ")
    assert re.search(r"^triton==", pinned, re.MULTILINE)
