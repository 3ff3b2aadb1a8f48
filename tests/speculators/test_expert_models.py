"""Drafts for models with experts: greedy text equals that without drafts, whatever else happens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from slipstream.configs.schema import SpeculativeConfig
from slipstream.runner.messages import AbortRequests, AddRequest, SamplingParams

from ..cases import some
from .eagle_oracle import head_weights, save_head
from .tiny_engine import MAX_LEN, Run, TinyEngine, prompts

VOCAB, DRAFT_VOCAB = 12, 8  # so few that a random head is sometimes right
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=8, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=MAX_LEN, initializer_range=0.4,
    tie_word_embeddings=False, eos_token_id=None, bos_token_id=None, num_experts_per_tok=2,
)  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "truncate": False}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3Moe": dict(
        num_experts=6, moe_intermediate_size=16, intermediate_size=48, norm_topk_prob=True,
        mlp_only_layers=[1],
    ),
    "GptOss": dict(
        num_local_experts=4, intermediate_size=32, sliding_window=6,
        rope_parameters=YARN | {"original_max_position_embeddings": 16},
    ),
}  # fmt: skip

MOST = 24  # tokens of a reply
NUM_BLOCKS = {"Qwen3Moe": 33, "GptOss": 37}  # too few for all; gpt-oss has two KV groups


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Each family's target, and the EAGLE-3 head."""
    root = tmp_path_factory.mktemp("models")
    for family, more in FAMILIES.items():
        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**SHAPE, **more)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("sinks", "bias")):
                    parameter.normal_()
        model.save_pretrained(root / family)
    weights = head_weights(True, vocab_size=VOCAB, draft_vocab_size=DRAFT_VOCAB)
    sizes = {"vocab_size": VOCAB, "draft_vocab_size": DRAFT_VOCAB}
    head = save_head(root / "head", weights, True, **sizes)
    return {family: root / family for family in FAMILIES} | {"head": head}


def speculative(method: str, head: Path) -> SpeculativeConfig:
    if method == "off":
        return SpeculativeConfig(method="off")
    model = str(head) if method == "eagle3" else None
    return SpeculativeConfig(method=method, model=model, num_speculative_tokens=3, watchdog=False)


def busy_run(
    model: Path, drafter: SpeculativeConfig, asked: list[list[int]], num_blocks: int
) -> tuple[Run, int]:
    """Serve all prompts in a KV cache that is too small for them, and cancel every fifth.

    Returns the results and the number of preemptions.
    """
    engine = TinyEngine(model, drafter, cache={"num_gpu_blocks_override": num_blocks})
    run = Run()
    waiting = [
        AddRequest(str(i), ids, SamplingParams(seed=i, max_tokens=MOST, temperature=0.0))
        for i, ids in enumerate(asked)
    ]
    num_preemptions = num_steps = 0
    while waiting or engine.engine.has_work():
        if waiting and num_steps % 2 == 0:
            engine.engine.handle([waiting.pop(0)])
        for step in engine.engine.step():
            run.take(step)
            num_preemptions += step.stats.num_preemptions
        for i in range(0, len(asked), 5):
            if 8 <= len(run.tokens.get(str(i), ())) < MOST:
                engine.engine.handle([AbortRequests([str(i)])])
        num_steps += 1
    engine.close()
    return run, num_preemptions


@pytest.mark.parametrize(
    ("family", "method"),
    some(
        [(family, method) for family in FAMILIES for method in ("ngram", "eagle3")],
        kept=[("Qwen3Moe", "ngram"), ("GptOss", "eagle3")],
    ),
)
def test_greedy_text_with_drafts_equals_off(
    family: str, method: str, folders: dict[str, Path]
) -> None:
    """Also of requests that are preempted, hit the prefix cache or run beside cancelled ones."""
    _compare(family, method, folders, 5)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_of_200_prompts_with_drafts_equals_off(
    family: str, folders: dict[str, Path]
) -> None:
    _compare(family, "eagle3", folders, 100)


def _compare(family: str, method: str, folders: dict[str, Path], count: int) -> None:
    """Compare the texts of twice as many prompts, of which each second continues the first."""
    firsts = [[token % VOCAB for token in ids] for ids in prompts(count, seed=3, longest=24)]
    asked = [ids for first in firsts for ids in (first, [*first, 5, 6, 7])]
    num_blocks = NUM_BLOCKS[family]

    def run(name: str) -> tuple[Run, int]:
        return busy_run(folders[family], speculative(name, folders["head"]), asked, num_blocks)

    (expected, _), (got, num_preemptions) = run("off"), run(method)
    assert num_preemptions and any(got.cached_tokens.values())
    assert 0 < got.accepted < got.drafted
    for i in range(len(asked)):
        ours, theirs = got.tokens[str(i)], expected.tokens[str(i)]
        shared = min(len(ours), len(theirs)) if i % 5 == 0 else MOST
        assert ours[:shared] == theirs[:shared] and shared >= 8
