"""Trains a head for a tiny random target, serves it and swaps it, as a user would."""

from __future__ import annotations

import json
import random
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from .conftest import RunningServer, environment, slipstream

VOCAB, HIDDEN, DRAFTS = 64, 64, 2
# A reply has the first token and the tokens of two verify steps that accept all drafts.
REPLY = 1 + 2 * (DRAFTS + 1)
MAX_LEN, NUM_PROMPTS = 32, 16


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random Llama with the words w0, w1, ... as its tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from ..speculators.tiny_engine import stated

    folder = tmp_path_factory.mktemp("target")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
        initializer_range=0.8, tie_word_embeddings=False, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    return stated(folder)


def run(*arguments: str) -> str:
    done = subprocess.run(
        [slipstream(), *arguments], capture_output=True, text=True, env=environment(), timeout=200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_a_trained_head_drafts_the_texts_that_it_has_learnt(target: Path, tmp_path: Path) -> None:
    chance = random.Random(1)
    prompts = [chance.choices(range(VOCAB), k=4) for _ in range(NUM_PROMPTS)]
    lines = []
    for split in ("train", "heldout"):  # the same texts in both, since this head must memorize them
        for prompt in prompts:
            text = " ".join(f"w{i}" for i in prompt)
            lines.append(json.dumps({"prompt": text, "split": split, "domain": "words"}))
        if (
            split == "train"
        ):  # the server's probe prompts in this vocabulary, cut to half its context
            probe = " ".join(["w0"] * (MAX_LEN // 2))
            lines.append(json.dumps({"prompt": probe, "split": split, "domain": "words"}))
    data = tmp_path / "prompts.jsonl"
    data.write_text("\n".join(lines))
    head = tmp_path / "head"
    model = ["--model", str(target), "--dtype", "float32", "--device", "cpu", "--data", str(data)]
    output = run(
        "train", *model, "--output", str(head), "--max-reply-tokens", str(REPLY + 1),
        "--temperatures", "0", "--draft-vocab-size", "60", "--head-intermediate-size", "192",
        "--num-speculative-tokens", str(DRAFTS), "--max-steps", "90", "--learning-rate", "0.01",
        "--warmup", "0.1", "--clip", "1", "--loss-decay", "1", "--batch-tokens", "2048",
        "--eval-every", "45", "--kv-cache-memory-bytes", "4M",
    )  # fmt: skip
    assert "held-out acceptance length" in output
    names = {path.name for path in head.iterdir()}
    assert names >= {"config.json", "model.safetensors", "README.md", "training.png"}
    card = (head / "README.md").read_text()
    assert f"words {NUM_PROMPTS}" in card and "slipstream train --model" in card

    speculative = {"method": "eagle3", "model": str(head), "num_speculative_tokens": DRAFTS}
    server = RunningServer(
        str(target), "--dtype", "float32", "-sc", json.dumps(speculative), "--max-num-seqs", "8",
        "--kv-cache-memory-bytes", "4M", "--max-model-len", str(MAX_LEN), "--admin-api-key", "root",
    )  # fmt: skip
    try:
        server.wait_ready()
        texts = [_complete(server, target, prompt) for prompt in prompts]
        off = _replies(tmp_path)
        assert texts == off  # the target's replies without a drafter
        num_drafts = server.metric("spec_decode_num_drafts_total")
        for position in range(DRAFTS):
            accepted = server.metric(
                "spec_decode_num_accepted_tokens_per_pos_total", position=str(position)
            )
            assert accepted > 0.9 * num_drafts > 0, f"position {position}"
        # While requests run, a worse head is rejected and the same head is accepted.
        with ThreadPoolExecutor(3) as clients:
            replies = [clients.submit(_complete, server, target, prompt) for prompt in prompts]
            tried = _try(server, _worse(head, tmp_path / "worse"))
            assert not tried["swapped"], tried
            tried = _try(server, head)
            assert tried["swapped"], tried
            assert [reply.result() for reply in replies] == texts
        refused = httpx.post(f"{server.url}/v1/speculator", json={"model": "x"}, timeout=30)
        assert refused.status_code == 401
    finally:
        server.stop()


def _complete(server: RunningServer, target: Path, prompt: list[int]) -> list[str]:
    body = {"model": str(target), "prompt": prompt, "temperature": 0, "max_tokens": REPLY}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
    assert reply.status_code == 200, reply.text
    text: str = reply.json()["choices"][0]["text"]
    return text.split()


def _try(server: RunningServer, head: Path) -> dict[str, Any]:
    reply = httpx.post(
        f"{server.url}/v1/speculator",
        json={"model": str(head)},
        headers={"authorization": "Bearer root"},
        timeout=60,
    )
    assert reply.status_code == 200, reply.text
    found: dict[str, Any] = reply.json()
    return found


def _worse(head: Path, folder: Path) -> Path:
    """Copy the head to `folder` with a random output layer; returns `folder`."""
    import torch
    from safetensors.torch import load_file, save_file

    folder.mkdir()
    (folder / "config.json").write_text((head / "config.json").read_text())
    tensors = load_file(head / "model.safetensors")
    tensors["lm_head.weight"] = torch.randn(tensors["lm_head.weight"].shape)
    save_file(tensors, folder / "model.safetensors")
    return folder


def _replies(folder: Path) -> list[list[str]]:
    """The target's replies to the training prompts, in the order of the prompts."""
    lines = (folder / "head" / "work" / "replies.jsonl").read_text().splitlines()
    rows = sorted(json.loads(line) for line in lines)
    return [
        [f"w{i}" for i in ids[length : length + REPLY]] for _, length, _, ids in rows[:NUM_PROMPTS]
    ]
