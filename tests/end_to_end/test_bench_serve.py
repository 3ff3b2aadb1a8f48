"""`slipstream bench serve` measures the real server, from one process and from several."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from .conftest import RunningServer, environment, slipstream


@pytest.mark.parametrize(
    ("backend", "processes"), [("openai", "2"), ("openai-chat", "1")], ids=["two", "chat"]
)
def test_replies_are_counted_and_timed(
    backend: str, processes: str, server: RunningServer, tmp_path: Path
) -> None:
    output = tmp_path / "figures.json"
    before = server.metric("generation_tokens_total")
    command = [slipstream(), "bench", "serve", "--base-url", server.url, "--backend", backend]
    load = ["--num-prompts", "4", "--num-warmups", "0", "--max-concurrency", "2", "--ignore-eos"]
    sizes = ["--random-input-len", "8", "--random-output-len", "4", "--random-range-ratio", "0"]
    done = subprocess.run(
        [*command, *load, *sizes, "--client-processes", processes, "--output", str(output)],
        env=environment(), capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())
    assert (found["completed"], found["failed"], found["total_output_tokens"]) == (4, 0, 16)
    # Words and a chat template have more tokens than the eight ids of a completion's prompt.
    assert (found["total_input_tokens"] == 32) == (backend == "openai")
    assert found["total_input_tokens"] >= 32
    assert server.metric("generation_tokens_total") == before + 16
    assert 0 < found["ttft_ms"]["median"] <= found["e2el_ms"]["median"]
    assert found["client_processes"] == int(processes)
