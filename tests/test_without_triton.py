"""Triton is no requirement: without it, all but the kernels written in it can be imported."""

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
print("all")
"""


def test_everything_but_its_kernels_is_imported_without_triton() -> None:
    path = f"import sys; sys.path[:0] = {sys.path!r}\n"
    result = subprocess.run(
        [sys.executable, "-P", "-c", path + PROGRAM], capture_output=True, text=True, timeout=120
    )
    assert result.stdout == "all\n", result.stderr


def test_only_extras_for_gpus_and_tests_ask_for_triton() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert not [need for need in project["dependencies"] if need.startswith("triton")]
    extras = project["optional-dependencies"].items()
    asking = [name for name, needs in extras if any(need.startswith("triton") for need in needs)]
    assert asking == ["dev", "gpu"]


def test_the_commands_for_pip_in_the_readme_leave_it_out() -> None:
    """constraints.txt holds it for the tests, and xgrammar would bring it along."""
    pinned = (ROOT / "constraints.txt").read_text()
    commands = re.findall(r"^.*pip install.*$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert commands and all("--no-deps" in command for command in commands)
    (command,) = [command for command in commands if "constraints.txt" in command]
    assert command.startswith("grep -v '^triton==' constraints.txt | ")
    assert re.search(r"^triton==", pinned, re.MULTILINE)
