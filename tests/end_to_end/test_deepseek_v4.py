"""Tiny random DeepSeek V3.2 and V4 served over HTTP: alone, with the module, on two ranks."""

from __future__ import annotations

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


def replies(folder: Path, *flags: str) -> tuple[list[dict[str, Any]], RunningServer]:
    running = RunningServer(str(folder), "--dtype", "float32", "--max-num-seqs", "4", *flags)
    try:
        running.wait_ready()
        model = httpx.get(f"{running.url}/v1/models").json()["data"][0]["id"]
        body = {"model": model, "temperature": 0, "max_tokens": 24, "return_token_ids": True}
        found = []
        for prompt in PROMPTS:
            reply = httpx.post(f"{running.url}/v1/completions", json=body | {"prompt": prompt})
            assert reply.status_code == 200, reply.text
            found.append(reply.json()["choices"][0])
        messages = [{"role": "user", "content": "hello"}]
        body = {"model": model, "messages": messages, "max_tokens": 12, "n": 2, "temperature": 0}
        reply = httpx.post(f"{running.url}/v1/chat/completions", json=body)
        assert reply.status_code == 200, reply.text
        found += reply.json()["choices"]
    finally:
        assert running.stop() == 0, "".join(running.log)
    return found, running


@pytest.mark.slow
@pytest.mark.parametrize("family", ["V32", "V4"])
def test_replies_depend_on_neither_drafts_nor_ranks(family: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    if family == "V4":
        V4MtpOracle(folder, vocab_size=256)
    else:
        MtpOracle(folder, family="DeepseekV32", vocab_size=256)
    alphabet = sorted(ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = Decoder()
    tokenizer.save(str(folder / "tokenizer.json"))
    plain, _ = replies(folder, "-sc", "off")
    drafted, server = replies(folder, "-sc", "mtp")
    shared, _ = replies(folder, "-sc", "mtp", "-tp", "2")
    every = (plain, drafted, shared)
    ids = [[choice["token_ids"] for choice in found[:3]] for found in every]
    assert ids[0] == ids[1] == ids[2] and all(len(tokens) == 24 for tokens in ids[0])
    texts = [[choice["message"] for choice in found[3:]] for found in every]
    assert texts[0] == texts[1] == texts[2] and len(texts[0]) == 2
    assert any("mtp" in line for line in server.log)
