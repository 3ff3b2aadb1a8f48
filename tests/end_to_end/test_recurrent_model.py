"""A tiny Qwen3.5 served over HTTP with its MTP module: several choices, prefix hits, a cancel."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from ..speculators.qwen_oracle import QwenOracle
from ..speculators.recurrent_engine import texts
from ..speculators.tiny_engine import VOCAB
from .conftest import RunningServer


@pytest.mark.slow
def test_replies_are_those_of_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "target"
    oracle = QwenOracle(folder)
    words = {f"w{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    server = RunningServer(
        str(folder), "--dtype", "float32", "--block-size", "4", "--state-block-size", "8",
        "--served-model-name", "m", "--max-num-seqs", "6", "--max-num-batched-tokens", "64",
        "-sc", '{"method": "mtp", "num_speculative_tokens": 2}',
    ).wait_ready()  # fmt: skip
    prompts = [*texts(8, seed=5), *texts(8, seed=5)]  # the second time from the prefix cache

    def ask(prompt: list[int]) -> dict[str, object]:
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "n": 2, "model": "m"}
        answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    try:
        with httpx.stream(
            "POST", f"{server.url}/v1/completions",
            json={"prompt": prompts[0], "max_tokens": 60, "stream": True, "model": "m"}, timeout=60,
        ) as cancelled:  # fmt: skip
            next(cancelled.iter_lines())
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(ask, prompts))
        metrics = httpx.get(f"{server.url}/metrics").text
    finally:
        server.stop()
    cached = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.no_grad():
            ids = oracle.target.generate(
                torch.tensor([prompt]), max_new_tokens=12, do_sample=False
            )[0, len(prompt) :]
        wanted = " ".join(f"w{i}" for i in ids.tolist())
        for choice in answer["choices"]:  # type: ignore[attr-defined]
            assert choice["text"].strip() == wanted
        usage: dict[str, dict[str, int]] = answer["usage"]  # type: ignore[assignment]
        cached += usage["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 8 * 8
    accepted = [line for line in metrics.splitlines() if "num_accepted_tokens_total{" in line]
    assert float(accepted[0].split()[-1]) > 0
    assert any("recurrent states" in line for line in server.log)
