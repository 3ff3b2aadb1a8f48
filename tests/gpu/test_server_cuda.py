"""Servers on a GPU, started as users do, with a small DeepSeek model, over HTTP."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.end_to_end.running_server import RunningServer  # noqa: E402

from slipstream.configs.schema import CacheConfig, Config, GraphConfig, ModelConfig, SchedulerConfig
from slipstream.runner.engine.engine import build_engine  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(importlib.util.find_spec("flash_mla") is None, reason="needs flash_mla"),
]
DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 256,
    "hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 256,
    "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 16,
    "n_routed_experts": 16, "n_shared_experts": 1, "num_experts_per_tok": 4,
    "first_k_dense_replace": 1, "q_lora_rank": 256, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 2.5, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6,
    "num_nextn_predict_layers": 0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
PROMPTS = [list(range(2, 2 + length)) for length in (1, 3, 40, 63, 64, 65, 130, 200)]


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepseek")
    (folder / "config.json").write_text(json.dumps(DEEPSEEK))
    alphabet = sorted(ByteLevel.alphabet())
    Tokenizer(models.BPE({letter: i for i, letter in enumerate(alphabet)}, [])).save(
        str(folder / "tokenizer.json")
    )
    return folder


@pytest.fixture(params=["flash_mla", "triton"])
def server(request: pytest.FixtureRequest, deepseek: Path) -> Iterator[tuple[str, RunningServer]]:
    flags = ("--load-format", "dummy", "--max-num-seqs", "16", "--kv-cache-memory-bytes", "1g")
    flags += ("--attention-backend", request.param, "--debug-compare-eager", "-sc", "off")
    running = RunningServer(str(deepseek), *flags)
    try:
        yield request.param, running.wait_ready(300)  # other tests may use the cores
    finally:
        assert running.stop() == 0, "".join(running.log)


FIRST: dict[
    str, list[dict[str, float]]
] = {}  # back end -> log-probabilities of the first token, per prompt


def complete(url: str, prompt: list[int], max_tokens: int, **options: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    reply = httpx.post(f"{url}/v1/completions", json={**body, "model": "m", **options}, timeout=120)
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def test_deepseek_replies_are_complete_and_equal_between_back_ends(
    server: tuple[str, RunningServer],
) -> None:
    backend, running = server
    model = httpx.get(f"{running.url}/v1/models").json()["data"][0]["id"]
    log = "".join(running.log)
    assert f"attention back end: {backend}," in log, log

    def ask(prompt: list[int]) -> dict[str, Any]:
        return complete(running.url, prompt, 100, model=model, logprobs=5, return_token_ids=True)

    alone = [ask(prompt) for prompt in PROMPTS[:2]]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        together = list(pool.map(ask, PROMPTS))
    assert all(len(choice["token_ids"]) == 100 for choice in alone + together)
    assert running.metric("generation_tokens_total") == 100 * (len(alone) + len(together))
    FIRST[backend] = [choice["logprobs"]["top_logprobs"][0] for choice in together]
    if len(FIRST) == 2:
        for mine, theirs in zip(*FIRST.values(), strict=True):
            common = mine.keys() & theirs.keys()
            assert len(common) >= 3
            assert all(abs(mine[token] - theirs[token]) < 0.05 for token in common)


@pytest.mark.parametrize("backend", ["flash_mla", "triton"])
@pytest.mark.parametrize("wanted", [16, 64])
def test_the_kv_cache_stays_within_its_memory_budget(
    deepseek: Path, backend: str, wanted: int
) -> None:
    budget = 64 << 20  # less than the requests could use
    config = Config(
        model=ModelConfig(model=str(deepseek), load_format="dummy"),
        cache=CacheConfig(block_size=wanted, kv_cache_memory_bytes=budget),
        scheduler=SchedulerConfig(max_num_seqs=16),
        graph=GraphConfig(attention_backend=backend, enforce_eager=True),
    )
    engine = build_engine(config, lambda _: None)
    cache: Any = engine._runner._target.cache  # type: ignore[attr-defined]
    used = sum(tensor.nbytes for tensor in cache.kv_caches.values())
    engine.shutdown()
    assert cache.block_size == engine.ready.block_size == (64 if backend == "flash_mla" else wanted)
    assert 0.95 * budget < used == cache.num_bytes <= budget
