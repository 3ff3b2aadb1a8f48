"""The comparisons of tests/lab/measure_chain.py run without a GPU and use valid choices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slipstream.kernels.linear.linear_choice import Shape, fits

pytest.importorskip("triton")
ROOT = Path(__file__).parents[3]
sys.path.append(str(ROOT / "tests" / "lab"))
import chain_variants  # noqa: E402

SIZES = {
    "Llama-8B": {
        "qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336),
        "head": (128256, 4096),
    },
    "SmolLM2": {
        "qkv": (960, 576), "o": (576, 576), "gate_up": (3072, 576), "down": (576, 1536),
        "head": (49152, 576),
    },
}  # fmt: skip


def test_every_variant_fits_its_layer_and_none_is_there_twice() -> None:
    for (name, _), by_rows in chain_variants.ROLES.items():
        for rows, by_role in by_rows.items():
            for role, variants in by_role.items():
                if role in ("attention", "together"):
                    continue
                shape = Shape(role, *SIZES[name][role])
                assert len(set(variants)) == len(variants), (name, rows, role)
                assert all(fits(variant, shape, rows) for variant in variants), (name, rows, role)


@pytest.mark.slow
def test_every_part_launches_its_kernels_and_keeps_a_line_a_comparison() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / ".src"), "OMP_NUM_THREADS": "1"}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(ROOT / "tests" / "lab" / "dry_chain.py")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "does not run" not in done.stdout
    found = {line["part"]: line for line in map(json.loads, done.stdout.splitlines())}
    comparisons = sum(len(of) for by in chain_variants.ROLES.values() for of in by.values())
    heads = sum(map(len, chain_variants.HEADS.values()))
    expected = {
        "roles": comparisons, "attention": len(chain_variants.ATTENTION), "parts": 4, "heads": heads
    }  # fmt: skip
    assert {part: len(line["lines"]) for part, line in found.items()} == expected
    for line in found.values():
        assert line["kinds"] > 10
        for of in line["lines"].values():
            assert len(of) > 1 and None not in of.values()
