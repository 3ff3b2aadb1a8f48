"""Real server, real channel, no model: what the front end passes on, whole and at what cost."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


def bench_front_end() -> ModuleType:
    """The script of `tests/lab`."""
    name = "bench_front_end"
    spec = importlib.util.spec_from_file_location(
        name, Path(__file__).parents[2] / "lab" / f"{name}.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("endpoint", "tokens_per_step"), [("chat", 1), ("completions", 4)])
def test_every_stream_brings_its_whole_text_at_the_pace_of_the_engine(
    endpoint: str, tokens_per_step: int
) -> None:
    bench = bench_front_end()
    found = bench.run(bench.Load(32, 64, tokens_per_step, 2_000.0, endpoint))
    assert found.same_text
    # Far below what any machine does, far above a server that waits somewhere for a timer.
    assert found.tokens_per_second > 500
    # Start of 32 requests included, which is most of it.
    assert found.server_cpu_us < 2_000
