"""Two nodes as two process trees on this machine: a chat, a node that is killed, and signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from ..speculators.mtp_oracle import MtpOracle
from ..speculators.tiny_engine import VOCAB, save_llama, stated
from .running_server import RunningServer, Serving, free_port

SECRET = "a secret of the nodes"
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}w1 "
FLAGS = (
    *("--dtype", "float32", "--device", "cpu", "--served-model-name", "m"),
    *("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--num-gpu-blocks-override", "200"),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose words are w0, w1 ..."""
    return with_words(stated(save_llama(tmp_path_factory.mktemp("model"), layers=2)))


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DeepSeek V3 with the same words."""
    folder = tmp_path_factory.mktemp("experts") / "target"
    MtpOracle(folder)
    return with_words(folder)


def with_words(folder: Path) -> Path:
    tokenizer = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCAB)}, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


Starts = Callable[..., tuple[RunningServer, Serving]]


@pytest.fixture
def start(model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Starts]:
    """Starts both nodes with these flags. At the end, none of their processes may be left."""
    monkeypatch.setenv("SLIPSTREAM_GROUP_KEY", SECRET)
    started: list[subprocess.Popen[str]] = []
    seen: list[psutil.Process] = []

    def both(*flags: str, of: Path = model) -> tuple[RunningServer, Serving]:
        port = ("--nnodes", "2", "--master-port", str(free_port()))
        server = RunningServer(str(of), *FLAGS, *port, *flags)
        node = Serving(str(of), *FLAGS, *port, *flags, "--node-rank", "1")
        started.extend((server.process, node.process))
        server.wait_ready(240)
        for process in started:
            seen.extend([psutil.Process(process.pid), *psutil.Process(process.pid).children(True)])
        return server, node

    yield both
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait(10)
    deadline = time.monotonic() + 10
    while left := [process for process in seen if RunningServer.is_alive(process)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def body(max_tokens: int, stream: bool = False) -> dict[str, object]:
    messages = [{"role": "user", "content": "w3 w9 w27"}]
    return {
        "model": "m", "messages": messages, "max_tokens": max_tokens, "temperature": 0,
        "stream": stream,
    }  # fmt: skip


def chat(server: RunningServer) -> str:
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body(12), timeout=60)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def expected(model: Path) -> str:
    import torch
    from transformers import AutoModelForCausalLM

    target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompt = [3, 9, 27, 1]
    with torch.no_grad():
        ids = target.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)
    return " " + " ".join(f"w{i}" for i in ids[0, len(prompt) :].tolist())


def stream_until_error(server: RunningServer, then: Callable[[], None]) -> tuple[str, float]:
    """The error that ends a stream, and how many seconds after `then` it came."""
    url, error = f"{server.url}/v1/chat/completions", ""
    with httpx.stream("POST", url, json=body(100, stream=True), timeout=60) as reply:
        lines = (line for line in reply.iter_lines() if line)
        next(lines)
        then()
        began = time.monotonic()
        for line in lines:
            if "error" in line:
                error = json.loads(line.removeprefix("data: "))["error"]["message"]
    return error, time.monotonic() - began


def test_two_nodes_share_a_model_and_one_that_is_killed_ends_the_requests(
    start: Starts, model: Path
) -> None:
    server, node = start("-tp", "2")
    assert chat(server) == expected(model)
    (rank,) = psutil.Process(node.process.pid).children()
    assert "engine.rank" in rank.cmdline()[-1]
    rank.suspend()  # so that the stream is not over before the node is
    error, seconds = stream_until_error(server, node.process.kill)
    assert "node 1 (127.0.0.1) is gone" in error and seconds < 10
    health = httpx.get(f"{server.url}/health")
    assert health.status_code == 503 and "node 1 (127.0.0.1) is gone" in health.text
    refused = httpx.post(f"{server.url}/v1/chat/completions", json=body(5), timeout=10)
    assert refused.status_code == 503
    assert server.stop() == 0


@pytest.mark.slow
def test_a_node_that_was_killed_joins_again(start: Starts, model: Path) -> None:
    server, node = start("-tp", "2")
    node.process.kill()
    arguments = psutil.Process(server.process.pid).cmdline()
    port = arguments[arguments.index("--master-port") + 1]
    flags = (*FLAGS, "--nnodes", "2", "--master-port", port, "-tp", "2")
    again = Serving(str(model), *flags, "--node-rank", "1")
    deadline = time.monotonic() + 90
    while not any("ready again" in line for line in server.log):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert chat(server) == expected(model)
    again.process.send_signal(signal.SIGTERM)  # also of a node that runs no server
    assert server.process.wait(20) == 0 and again.wait() == 0


@pytest.mark.slow
def test_the_second_node_may_run_an_engine_of_its_own(start: Starts, model: Path) -> None:
    server, node = start("-dp", "2")
    assert [chat(server) for _ in range(4)] == [expected(model)] * 4
    requests = httpx.get(f"{server.url}/metrics").text
    assert 'engine="1"' in requests
    node.process.kill()
    assert node.wait() == -signal.SIGKILL
    assert chat(server) == expected(model)  # the first engine goes on
    assert server.stop() == 0


@pytest.mark.slow
def test_engines_of_two_nodes_share_experts_and_rest_together(start: Starts, experts: Path) -> None:
    server, node = start("-dp", "2", "--enable-expert-parallel", of=experts)
    assert [chat(server) for _ in range(4)] == [expected(experts)] * 4
    assert 'engine="1"' in httpx.get(f"{server.url}/metrics").text
    error, seconds = stream_until_error(server, node.process.kill)
    assert "node 1 (127.0.0.1) is gone" in error and seconds < 10
    assert httpx.get(f"{server.url}/health").status_code == 503  # no engine serves alone
    assert server.stop() == 0


@pytest.mark.parametrize("which", [pytest.param("the first", marks=pytest.mark.slow), "the second"])
def test_sigterm_on_one_node_drains_and_ends_both(
    which: str, start: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_TEST_ENGINE", "fake_engine:build")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*_python_path(), str(_FAKE)]))
    server, node = start("-dp", "2", "--hf-overrides", '{"step_seconds": 0.02}')
    asked = server.process if which == "the first" else node.process
    url = f"{server.url}/v1/chat/completions"
    ends: list[str] = []
    for _ in range(2):  # one for each engine
        with httpx.stream("POST", url, json=body(60, stream=True), timeout=30) as reply:
            lines = (line for line in reply.iter_lines() if line)
            next(lines)
            if len(ends) == 1:
                asked.send_signal(signal.SIGTERM)
            ends.append(list(lines)[-1])
    assert ends == ["data: [DONE]"] * 2  # the stream was finished first
    assert server.process.wait(20) == 0 and node.wait() == 0
    assert not any("Traceback" in line for line in [*server.log, *node.log])


@pytest.mark.slow
def test_a_node_ends_when_the_first_one_is_killed(
    start: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_TEST_ENGINE", "fake_engine:build")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*_python_path(), str(_FAKE)]))
    server, node = start("-dp", "2")
    server.process.kill()
    assert node.wait(10) == 1
    last = node.log[-1]
    assert last.startswith("slipstream serve: error: node 0 at 127.0.0.1:"), node.log
    assert last.endswith("is gone, so this node ends\n")


@pytest.mark.slow
def test_a_node_that_freezes_is_lost_after_its_heartbeats_stop(
    start: Starts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_TEST_ENGINE", "fake_engine:build")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([*_python_path(), str(_FAKE)]))
    server, node = start("-dp", "2")
    node.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    while not any("node 1 (127.0.0.1) is gone;" in line for line in server.log):
        assert time.monotonic() < began + 60, server.log
        time.sleep(0.1)
    node.process.send_signal(signal.SIGCONT)
    assert node.wait(20) == 1 and "node 0 at" in node.log[-1]
    assert server.stop() == 0


_FAKE = Path(__file__).parents[1] / "server"


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
