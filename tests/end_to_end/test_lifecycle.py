"""Start-up, failed start-up and shutdown of the real server; tests/reliability kills its worker.

Streams are greedy because sampling beyond the end of a text may yield only special tokens, which
are not shown.
"""

from __future__ import annotations

import socket
import subprocess
import time

import httpx
import pytest

from .conftest import RunningServer, environment, slipstream

MODEL = "smollm2-135m"


def run_until_exit(*flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [slipstream(), "serve", *flags],
        capture_output=True,
        text=True,
        timeout=90,
        env=environment(),
    )


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["/no/such/folder"], "/no/such/folder"),
        (["--max-num-seqs", "0"], "max-num-seqs"),
        (["--no-such-flag"], "--no-such-flag"),
        (["-sc", '{"method":"nonsense"}'], "nonsense"),
        (["--port", "0", "--max-model-len", "100000000"], "max-model-len"),
    ],
)
def test_a_bad_setting_ends_the_start_with_a_message_that_names_it(
    flags: list[str], words: str
) -> None:
    done = run_until_exit(*flags)
    assert done.returncode != 0
    assert words in done.stderr.replace("_", "-") or words in done.stderr
    assert "Traceback" not in done.stderr


def test_a_busy_port_ends_the_start_with_a_message_that_names_it() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run_until_exit("--port", str(port))
    assert done.returncode != 0
    assert str(port) in done.stderr and "Traceback" not in done.stderr


def test_help_lists_the_commands() -> None:
    for arguments in (["--help"], ["serve", "--help"]):
        out = subprocess.run([slipstream(), *arguments], capture_output=True, text=True, check=True)
        assert "serve" in out.stdout


def test_disconnect_frees_the_request_within_a_second(server: RunningServer) -> None:
    body = {
        "model": MODEL,
        "prompt": "Tell me a long story.",
        "max_tokens": 4000,
        "stream": True,
        "ignore_eos": True,
        "temperature": 0,
    }
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=30) as stream:
        assert stream.status_code == 200
        lines = (
            stream.iter_lines()
        )  # kept in a variable, because dropping the iterator closes the connection
        next(lines)
        assert server.metric("num_requests_running") == 1
    deadline = time.monotonic() + 1.0
    while server.metric("num_requests_running") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert server.metric("num_requests_running") == 0
    assert server.metric("kv_cache_usage_perc") == 0
