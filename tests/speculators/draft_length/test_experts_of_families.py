"""Costs of steps count the experts that K + 1 tokens touch, in every family that has experts."""

from __future__ import annotations

import itertools
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from slipstream.configs.model.model_config import ARCHITECTURE_OF_TYPE
from slipstream.configs.schema import Config, SchedulerConfig, SpeculativeConfig
from slipstream.runner.models.moe import DividedExperts
from slipstream.runner.models.registry import ARCHITECTURES
from slipstream.runner.step import step_timing
from slipstream.runner.step.traffic import expert_bytes

from ...cases import some
from ...runner.tiny_v4 import SHAPE as V4
from ...runner.tiny_v32 import SHAPE as V32
from ..tiny_engine import TinyEngine

EXPERTS, TOP_K, DRAFTS, REQUESTS, VOCAB = 16, 2, 3, 8, 61
# The settings of all families side by side; each reads its own.
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=32, moe_intermediate_size=32,
    shared_expert_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=256, sliding_window=64,
    eos_token_id=None, bos_token_id=None, pad_token_id=None,
    num_experts=EXPERTS, num_local_experts=EXPERTS, n_routed_experts=EXPERTS,
    num_experts_per_tok=TOP_K, top_k_experts=TOP_K, enable_moe_block=True, n_shared_experts=1,
    first_k_dense_replace=0, n_group=1, topk_group=1,
    q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16,
    linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=8,
    linear_value_head_dim=8, global_head_dim=16, hidden_size_per_layer_input=0,
)  # fmt: skip
COUNTED = {"n_routed_experts": EXPERTS, "num_experts_per_tok": TOP_K}
_DELTA = {"layer_types": ["linear_attention", "full_attention"]}
KINDS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), _DELTA),
    "gpt_oss": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    "deepseek_v2": {"n_group": None, "topk_group": None, "topk_method": "greedy"},
    "deepseek_v32": V32 | {"n_group": 1, "topk_group": 1} | COUNTED,
    "deepseek_v4": V4 | {"num_key_value_heads": 1} | COUNTED,
}  # fmt: skip
TYPE_OF = {architecture: kind for kind, architecture in ARCHITECTURE_OF_TYPE.items()}


def make_folder(architecture: str, folder: Path) -> Path:
    """A folder with a tiny config of the family; weights are random."""
    kind = TYPE_OF[architecture]
    whole = transformers.CONFIG_MAPPING[kind]
    part = getattr(whole, "sub_configs", {}).get("text_config")
    text = kind if part is None else getattr(part, "model_type", kind)
    settings = SHAPE | KINDS.get(text, {})
    config = whole(**settings) if part is None else whole(text_config=settings)
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "architecture",
    some(ARCHITECTURES, kept=["Qwen3_5MoeForCausalLM", "GptOssForCausalLM", "LlamaForCausalLM"]),
)
def test_timed_steps_touch_the_experts_of_real_ones(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """K is chosen by timed steps, so a timed step of K + 1 tokens must touch as many experts as a
    real one; and the bytes that a step reads are those of the experts of its tokens."""
    touched: dict[int, list[int]] = defaultdict(list)  # rows of a step -> experts of each layer
    run = DividedExperts.forward

    def noted(self: DividedExperts, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        touched[ids.shape[0]].append(ids.unique().numel())
        return run(self, x, weights, ids)

    def mean(rows: int) -> float:
        return sum(touched[rows]) / len(touched[rows])

    drafter = SpeculativeConfig(method="ngram", num_speculative_tokens=DRAFTS)
    limits = {"max_num_seqs": REQUESTS + 1, "max_num_batched_tokens": 64}
    folder = make_folder(architecture, tmp_path)
    monkeypatch.setattr(step_timing, "_CPU_SECONDS", 1e6)  # all cells, on a busy machine too
    monkeypatch.setattr(DividedExperts, "forward", noted)
    monkeypatch.setattr(DividedExperts, "parts", lambda self, *args, spare=0: self.forward(*args))
    engine = TinyEngine(folder, drafter, load_format="dummy", scheduler=limits)
    runner: Any = engine.engine._runner
    every = (DRAFTS + 1, REQUESTS * (DRAFTS + 1))
    touched.clear()
    for seed, rows in itertools.product(range(4), every):
        generator = torch.Generator().manual_seed(seed)
        engine.run([torch.randint(VOCAB, (rows,), generator=generator).tolist()], max_tokens=1)
    real = {rows: mean(rows) for rows in every if touched[rows]}
    touched.clear()
    config = Config(scheduler=SchedulerConfig(**limits), speculative=drafter)
    found = step_timing.measure_steps(runner, config)
    engine.close()
    assert set(found) >= {(1, 0), (1, DRAFTS), (REQUESTS, DRAFTS)}
    model = runner._target.model
    has_experts = any(isinstance(part, DividedExperts) for part in model.modules())
    size, share = expert_bytes(model)
    if not has_experts:
        assert not real and (size, share) == (0, 0.0)
        return
    assert size > 0 and share * EXPERTS == TOP_K == mean(1)
    for rows, expected in real.items():
        assert expected > 1.4 * TOP_K and mean(rows) > 0.8 * expected
