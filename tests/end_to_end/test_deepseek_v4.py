"""Tiny random DeepSeek V3.2 and V4 served over HTTP: alone, with the module, on two ranks. Their
chats have the built-in format, with tools, too."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, models
from tokenizers.decoders import ByteLevel as Decoder
from tokenizers.pre_tokenizers import ByteLevel

from ..speculators.mtp_oracle import MtpOracle
from ..speculators.v4_mtp_oracle import V4MtpOracle
from .running_server import RunningServer

PROMPTS = ["a", "compressed", "the window of raw rows is far behind us by now" * 2]

SIZE = 264  # of the vocabulary: the bytes, and these tokens
SPECIAL = [
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    *("<think>", "</think>", "｜DSML｜"),
]
PARAMETERS = {
    "type": "object",
    "properties": {"near": {"type": "boolean"}, "unit": {"enum": ["m", "km"]}},
    "required": ["near", "unit"],
    "additionalProperties": False,
}
FAR = {"name": "far", "description": "How far is it?", "parameters": PARAMETERS, "strict": True}
TOOLS = [{"type": "function", "function": FAR}]


def replies(folder: Path, *flags: str) -> tuple[list[dict[str, Any]], RunningServer]:
    running = RunningServer(str(folder), "--dtype", "float32", "--max-num-seqs", "4", *flags)
    try:
        running.wait_ready()
        model = httpx.get(f"{running.url}/v1/models").json()["data"][0]["id"]
        body = {"model": model, "temperature": 0, "max_tokens": 24, "return_token_ids": True}
        body["ignore_eos"] = True
        found = []
        for prompt in PROMPTS:
            asked = body | {"prompt": prompt}
            reply = httpx.post(f"{running.url}/v1/completions", json=asked, timeout=60)
            assert reply.status_code == 200, reply.text
            found.append(reply.json()["choices"][0])
        messages = [{"role": "user", "content": "hello"}]
        body = {"model": model, "messages": messages, "max_tokens": 12, "n": 2, "temperature": 0}
        reply = httpx.post(f"{running.url}/v1/chat/completions", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        found += reply.json()["choices"]
    finally:
        assert running.stop() == 0, "".join(running.log)
    return found, running


def model_of(family: str, tmp_path: Path) -> Path:
    """A folder with a model, its module and a tokenizer of bytes and the format's tokens."""
    folder = tmp_path / "model"
    if family == "V4":
        V4MtpOracle(folder, vocab_size=SIZE, max_position_embeddings=4096)
    else:
        MtpOracle(folder, family="DeepseekV32", vocab_size=SIZE, max_position_embeddings=4096)
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = Decoder()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    ends = {"eos_token_id": tokenizer.token_to_id("<｜end▁of▁sentence｜>")}
    (folder / "generation_config.json").write_text(json.dumps(ends))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("family", ["V32", "V4"])
def test_replies_depend_on_neither_drafts_nor_ranks(family: str, tmp_path: Path) -> None:
    folder = model_of(family, tmp_path)
    plain, _ = replies(folder, "-sc", "off")
    drafted, server = replies(folder, "-sc", "mtp")
    shared, _ = replies(folder, "-sc", "mtp", "-tp", "2")
    every = (plain, drafted, shared)
    ids = [[choice["token_ids"] for choice in found[:3]] for found in every]
    assert ids[0] == ids[1] == ids[2] and all(len(tokens) == 24 for tokens in ids[0])
    texts = [[choice["message"] for choice in found[3:]] for found in every]
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) == 2
    assert any("mtp" in line for line in server.log)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["V32", "V4"])
def test_a_chat_with_tools(family: str, tmp_path: Path) -> None:
    folder = model_of(family, tmp_path)
    flags = ("--dtype", "float32", "--max-num-seqs", "4", "-sc", "mtp")
    running = RunningServer(str(folder), *flags)
    try:
        running.wait_ready()
        model = httpx.get(f"{running.url}/v1/models").json()["data"][0]["id"]
        chat = {
            "model": model,
            "messages": [{"role": "user", "content": "hello"}],
            "tools": TOOLS,
        }
        tokens = httpx.post(f"{running.url}/tokenize", json=chat).json()["tokens"]
        body = {"model": model, "tokens": tokens}
        prompt = httpx.post(f"{running.url}/detokenize", json=body).json()["prompt"]
        block = "tool_calls" if family == "V4" else "function_calls"
        assert f"<｜DSML｜{block}>" in prompt and json.dumps(FAR) in prompt
        sampling = {"max_tokens": 400, "temperature": 1, "seed": 3}
        for choice in ("required", {"type": "function", "function": {"name": "far"}}, "auto"):
            reply = httpx.post(
                f"{running.url}/v1/chat/completions",
                json={**chat, **sampling, "tool_choice": choice, "parallel_tool_calls": False},
                timeout=120,
            )
            assert reply.status_code == 200, reply.text
            if choice != "auto":  # a random model calls nothing by itself
                (found,) = reply.json()["choices"]
                assert found["finish_reason"] == ("tool_calls" if choice == "required" else "stop")
                (call,) = found["message"]["tool_calls"]
                arguments = json.loads(call["function"]["arguments"])
                assert call["function"]["name"] == "far"
                assert arguments["near"] in (True, False) and arguments["unit"] in ("m", "km")
    finally:
        assert running.stop() == 0, "".join(running.log)
