"""The limits of a step that fit a GPU and a model, where the user leaves them open."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Gemma4TextConfig

from slipstream.configs.schema import (
    CacheConfig,
    Config,
    ModelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    StepLimits,
)
from slipstream.kernels.device import Card
from slipstream.runner.engine.engine import join
from slipstream.runner.startup import load_target
from slipstream.runner.startup.assembly import assemble
from slipstream.runner.startup.limits import (
    LARGE,
    SMALL,
    ModelNeeds,
    activation_bytes,
    choose_limits,
    completed,
)
from slipstream.runner.step.model_runner import ModelRunner

from ...speculators.tiny_engine import save_llama

GIB = 1 << 30
H200 = Card("NVIDIA H200", (9, 0), 132, 140 * GIB)
H100 = Card("NVIDIA H100 80GB HBM3", (9, 0), 132, 79 * GIB)
H100_PART = Card("NVIDIA H100 MIG 3g.40gb", (9, 0), 60, 39 * GIB)
A100 = Card("NVIDIA A100-SXM4-80GB", (8, 0), 108, 79 * GIB)
WIDTHS = {"hidden_size": 4096, "intermediate_size": 14336}
TOKEN_BYTES = activation_bytes(SimpleNamespace(**WIDTHS), 4096, 2)
EAGLE = SpeculativeConfig("eagle3", "head")


def needs(weights: float = 16, cache: float = 16, vocab_size: int = 128_256) -> ModelNeeds:
    """Those of an 8B model with a context of 131,072 tokens; sizes in GiB."""
    return ModelNeeds(int(weights * GIB), int(cache * GIB), TOKEN_BYTES, vocab_size, 131_072)


def chosen(card: Card | None, model: ModelNeeds, used: float = 0.5, **sections: Any) -> StepLimits:
    return choose_limits(Config(**sections), card, model, int(used * GIB))[0]


def test_the_dry_start_runs_steps_of_all_sizes_that_limits_choose() -> None:
    """Experts have other kernels from 2,049, 4,097 or 5,462 tokens on, by their number."""
    from slipstream.runner.startup.dry_start import any_limits

    dry = any_limits(Config()).scheduler
    for limits in (*LARGE, SMALL):
        assert dry.max_num_batched_tokens is not None and dry.max_num_seqs is not None
        assert dry.max_num_batched_tokens >= limits.max_num_batched_tokens
        assert dry.max_num_seqs > limits.max_num_seqs


@pytest.mark.parametrize(
    ("card", "expected"),
    [(H200, LARGE[0]), (H100, LARGE[0]), (H100_PART, SMALL), (A100, SMALL), (None, SMALL)],
)
def test_a_large_gpu_gets_large_steps(card: Card | None, expected: StepLimits) -> None:
    assert chosen(card, needs(), speculative=EAGLE) == expected
    assert LARGE[0] == StepLimits(256, 8192) and SMALL == StepLimits(64, 2048)


@pytest.mark.parametrize(
    ("weights", "cache", "used", "expected"),
    [
        (16, 16, 0.5, LARGE[0]),
        (48, 4, 0.5, LARGE[1]),
        (62, 4, 0.5, SMALL),  # a large model on this GPU
        (90, 4, 0.5, SMALL),  # it does not fit at all; another check says so
        (16, 44, 0.5, LARGE[1]),  # one long request needs most of what is left
        (16, 53, 0.5, SMALL),
        (16, 16, 30.0, LARGE[1]),  # other processes hold memory
        (16, 16, 45.0, SMALL),
    ],
)
def test_little_memory_beside_the_weights_makes_smaller_steps(
    weights: float, cache: float, used: float, expected: StepLimits
) -> None:
    assert chosen(H100, needs(weights, cache), used, speculative=EAGLE) == expected


def test_a_choice_leaves_the_kv_cache_its_room_and_the_smallest_is_todays() -> None:
    """Whatever the sizes: larger steps than the former defaults only where one request of the full
    length fits beside twice their estimate."""
    for weights in range(1, 80, 3):
        for cache in (0.1, 1, 5, 20, 40):
            for speculative in (SpeculativeConfig(), EAGLE):
                config = Config(speculative=speculative)
                model = needs(weights, cache)
                limits, _ = choose_limits(config, H100, model, GIB // 2)
                left = 0.9 * H100.memory_bytes - GIB // 2 - model.weights
                step = model.step(limits, speculative.max_row_tokens)
                if limits != SMALL:
                    assert left - 2 * step >= model.least_cache and step < left / 4
                assert limits in (*LARGE, SMALL)


def test_what_the_user_sets_stays_and_the_other_limit_goes_with_it() -> None:
    def given(speculative: SpeculativeConfig = EAGLE, **limits: int | bool) -> StepLimits:
        scheduler = SchedulerConfig(**limits)  # type: ignore[arg-type]
        return chosen(H200, needs(), scheduler=scheduler, speculative=speculative)

    assert given(max_num_seqs=7, max_num_batched_tokens=99) == StepLimits(7, 99)
    assert given(max_num_seqs=8) == StepLimits(8, 8192)
    assert given(max_num_seqs=4000) == StepLimits(4000, 24_000)  # with five drafts for each
    assert given(max_num_batched_tokens=600) == StepLimits(100, 600)
    assert given(SpeculativeConfig(), max_num_batched_tokens=3) == StepLimits(3, 3)
    assert given(enable_chunked_prefill=False) == StepLimits(128, 131_072)
    assert completed(Config(), SMALL, 9) == SMALL


def test_a_fixed_kv_cache_must_fit_too() -> None:
    cache = CacheConfig(kv_cache_memory_bytes=50 * GIB)
    assert chosen(H100, needs(cache=50), cache=cache) == SMALL


def test_experts_and_wide_layers_need_memory_for_each_token() -> None:
    dense = SimpleNamespace(**WIDTHS)
    experts = SimpleNamespace(**WIDTHS, moe_intermediate_size=2048, num_experts_per_tok=8)
    assert activation_bytes(dense, 4096, 2) == 2 * (6 * 4096 + 4 * 4096 + 4 * 14336)
    assert activation_bytes(experts, 4096, 2) == 2 * (10 * 4096 + 4 * 8 * (2048 + 4096))


def test_a_config_that_differs_between_layers_counts_with_its_widest() -> None:
    text = Gemma4TextConfig(
        hidden_size=64, intermediate_size=96, num_attention_heads=4, head_dim=16,
        global_head_dim=32, num_hidden_layers=2, use_double_wide_mlp=True,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    assert activation_bytes(text, 128, 2) == 2 * (6 * 64 + 4 * 128 + 4 * 2 * 96)


def config_of(folder: Path, **sections: Any) -> Config:
    model = ModelConfig(model=str(folder), dtype="float32", device="cpu")
    cache = CacheConfig(kv_cache_memory_bytes=1 << 22)
    return Config(model=model, cache=cache, **sections)


@pytest.mark.parametrize("card", [None, H200, A100])
def test_a_start_uses_and_reports_what_fits(
    tmp_path: Path,
    card: Card | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With a pretended GPU: the model still runs on the CPU."""
    monkeypatch.setattr(load_target, "card_of", lambda device: card)
    config = config_of(save_llama(tmp_path))
    with caplog.at_level(logging.INFO):
        parts = assemble(config, lambda _: None)
    limits = LARGE[0] if card is H200 else SMALL
    assert parts.facts.limits == limits
    assert parts.table.max_num_reqs == limits.max_num_seqs
    (line,) = [m for m in caplog.messages if m.startswith("a step has at most")]
    assert f"{limits.max_num_seqs} requests (--max-num-seqs)" in line
    assert f"{limits.max_num_batched_tokens} tokens (--max-num-batched-tokens)" in line
    assert (card.name if card else "the default on a CPU") in line
    engine = join(ModelRunner(parts), config)
    assert engine.ready.max_num_seqs == limits.max_num_seqs
    assert engine.ready.max_num_batched_tokens == limits.max_num_batched_tokens
    engine.shutdown()
