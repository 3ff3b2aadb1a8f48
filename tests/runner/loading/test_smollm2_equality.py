"""SmolLM2-135M-Instruct as served generates the text of transformers with the same weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.initialization import no_init_weights

from slipstream.configs.preset import preset_model
from slipstream.configs.schema import ModelConfig
from slipstream.runner.loading.quantised.delivery import widened
from slipstream.runner.loading.weights import (
    open_checkpoint,
    resolve_model,
)
from slipstream.runner.models.base import TextModel
from slipstream.server.text.gguf_metadata import read_gguf_metadata

from ...cases import some
from ..model_harness import Sequences, load

PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "Water boils at",
    "1, 2, 3, 4, 5,",
    "The three primary colours are",
    '{"name": "Ada", "age":',
    "To make a good cup of tea, first",
    "Photosynthesis is the process by which",
    "Dear Sir or Madam,\n\nI am writing to",
    "SELECT name FROM users WHERE",
    "The opposite of hot is",
    "In 1969, Apollo 11",
    "A haiku about rain:\n",
    "The derivative of x^2 is",
    "Translate to French: Good morning ->",
    "My favourite season is autumn because",
    "<html>\n<head>\n",
    "The mitochondria is the",
    "Q: Why is the sky blue?\nA:",
]
NEW_TOKENS = 12
# A different token is accepted only if the oracle's logits of both tokens differ by less than this;
# fp16 weights change a logit by about a tenth of it.
NEAR_TIE = {"float32": 1e-3, "auto": 0.1}


@pytest.fixture(scope="module")
def gguf_path() -> Path:
    return Path(preset_model("smollm2-135m"))


@pytest.fixture(scope="module")
def prompts(gguf_path: Path) -> list[list[int]]:
    """Token ids by the vocabulary in the file: longest piece first, which any model accepts."""
    pieces = read_gguf_metadata(gguf_path)["tokenizer.ggml.tokens"]
    ids = {piece: index for index, piece in enumerate(pieces)}
    encoded = []
    for prompt in PROMPTS:
        text = prompt.replace(" ", "Ġ").replace("\n", "Ċ")
        row: list[int] = []
        while text:
            size = next(n for n in range(len(text), 0, -1) if text[:n] in ids)
            row.append(ids[text[:size]])
            text = text[size:]
        encoded.append(row)
    return encoded


@pytest.fixture(scope="module")
def oracle(gguf_path: Path) -> Any:
    """transformers' model with the dequantised weights, fp32."""
    resolved = resolve_model(ModelConfig(model=str(gguf_path)))
    config = transformers.LlamaConfig(**vars(resolved.hf_config))
    config._attn_implementation = "eager"
    with no_init_weights():  # they come from the file
        model = transformers.LlamaForCausalLM._from_config(config, dtype=torch.float32).eval()
    weights = {name: widened(rows) for name, rows in open_checkpoint(resolved).tensors()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights)
    return model


def greedy_texts(
    model: TextModel, prompts: list[list[int]]
) -> tuple[list[list[int]], list[Tensor]]:
    """Prompts and their greedy continuations as served, all requests in one batch, and the logits
    [tokens - 1, V] that were computed on the way."""
    sequences = Sequences(model, len(prompts), 64, block_size=16)
    texts = [list(prompt) for prompt in prompts]
    steps = [list(prompt) for prompt in prompts]
    chunks: list[list[Tensor]] = [[] for _ in prompts]
    for _ in range(NEW_TOKENS):
        rows = sequences.step(list(enumerate(steps)))[0]
        for index, logits in enumerate(rows):
            chunks[index].append(logits)
            steps[index] = [int(logits[-1].argmax())]
            texts[index] += steps[index]
    return texts, [torch.cat(parts) for parts in chunks]


@pytest.mark.parametrize("dtype", some(("float32", "auto"), ("auto",)))
def test_greedy_text_equals_transformers_but_for_near_ties(
    dtype: str, gguf_path: Path, prompts: list[list[int]], oracle: Any, record_property: Any
) -> None:
    if dtype == "auto":  # the long form, in float32, has all of them
        prompts = prompts[::6]
    texts, logits = greedy_texts(load(gguf_path, dtype), prompts)
    longest = max(map(len, texts))
    # teacher-forced: causal attention never sees the padding on the right
    padded = torch.tensor([ids + [0] * (longest - len(ids)) for ids in texts])
    with torch.inference_mode():
        expected = oracle(padded).logits
    gaps = []
    for prompt, ids, ours, theirs in zip(prompts, texts, logits, expected, strict=True):
        for at in range(len(prompt) - 1, len(ids) - 1):
            best, chosen = int(theirs[at].argmax()), ids[at + 1]
            if best != chosen:
                gap = float(theirs[at, best] - theirs[at, chosen])
                gaps.append({"after": ids[: at + 1], "oracle": best, "served": chosen, "gap": gap})
        if dtype == "float32":
            torch.testing.assert_close(ours, theirs[: len(ours)], atol=2e-3, rtol=1e-3)
    record_property("near_ties", json.dumps(gaps))
    print(f"{len(gaps)} of {len(prompts) * NEW_TOKENS} tokens differ: {gaps}")
    assert all(gap["gap"] < NEAR_TIE[dtype] for gap in gaps), gaps
    assert len(gaps) <= len(prompts) * NEW_TOKENS / 50
