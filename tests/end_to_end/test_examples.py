"""Every file in examples/ runs unchanged against the real server."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import RunningServer, environment

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS_A_GPU = ("train_smollm2_head.sh",)


def output_of(server: RunningServer, *command: str) -> str:
    done = subprocess.run(
        command,
        env={**environment(), "SLIPSTREAM_URL": server.url},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_example_has_a_test() -> None:
    shown = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".sh")}
    shown_here = {"curl.sh", "openai_sdk.py", "langchain_chat.py", "show_accepted.py"}
    assert shown == {*shown_here, *NEEDS_A_GPU}


@pytest.mark.parametrize("name", NEEDS_A_GPU)
def test_examples_for_gpus_have_valid_shell_syntax(name: str) -> None:
    subprocess.run(["bash", "-n", str(EXAMPLES / name)], check=True, timeout=10)


def test_curl(server: RunningServer) -> None:
    parts = output_of(server, str(EXAMPLES / "curl.sh")).split("# ")[1:]
    models, chat, stream, completion, schema = (part.partition("\n")[2] for part in parts)
    assert "smollm2-135m" in [model["id"] for model in json.loads(models)["data"]]
    text = json.loads(chat)["choices"][0]["message"]["content"]
    assert "Paris" in text
    events = [line.removeprefix("data: ") for line in stream.split("\n\n") if line.strip()]
    assert events.pop() == "[DONE]"
    chunks = [json.loads(event) for event in events]
    pieces = [choice["delta"].get("content") or "" for c in chunks for choice in c["choices"]]
    assert "".join(pieces) == text
    assert chunks[-1]["usage"]["completion_tokens"] > 0
    choice = json.loads(completion)["choices"][0]
    assert choice["text"].startswith(" 5, 6")
    assert all(len(places) == 3 for places in choice["logprobs"]["top_logprobs"])
    city = json.loads(json.loads(schema)["choices"][0]["message"]["content"])
    assert city["country"] in ("France", "Japan", "Peru") and len(city["city"]) <= 30


def test_openai_sdk(server: RunningServer) -> None:
    lines = output_of(server, sys.executable, str(EXAMPLES / "openai_sdk.py")).splitlines()
    assert "Paris" in lines[0]
    accepted = next(line for line in lines if line.startswith("predicted tokens accepted:"))
    assert accepted.endswith(
        " 0"
    )  # the preset's head does not use predictions, so none are accepted
    assert lines[-1] == "the same without speculation: True"


def test_langchain(server: RunningServer) -> None:
    lines = output_of(server, sys.executable, str(EXAMPLES / "langchain_chat.py")).splitlines()
    assert "Paris" in lines[0]
    assert lines[1:] == lines[:1]  # the streamed text equals the unstreamed one


def test_accepted_drafts_are_coloured(server: RunningServer, tmp_path: Path) -> None:
    picture = tmp_path / "answer.png"
    question = ("What is the capital of France?", "--max-tokens", "16", "--png", str(picture))
    shown = output_of(server, sys.executable, str(EXAMPLES / "show_accepted.py"), *question)
    answer, _, summary = shown.rstrip().rpartition("\n")
    tokens, steps = (int(word) for word in summary.split() if word.isdigit())
    coloured = answer.count("\033[30;42m")
    assert "Paris" in answer.replace("\033[30;42m", "").replace("\033[0m", "")
    assert coloured == tokens - steps and 0 < steps <= tokens <= 16
    assert picture.read_bytes().startswith(b"\x89PNG")
