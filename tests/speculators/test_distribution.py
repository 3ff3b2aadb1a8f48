"""Whole engines with every kind of drafter emit the target's distribution: chi-square tests against
enumerated probabilities."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor
from transformers import LlamaForCausalLM

from slipstream.configs.schema import SpeculativeConfig
from slipstream.speculators import base

from ..cases import some
from .eagle_oracle import head_weights, save_head
from .tiny_engine import TinyEngine, save_llama

V, LENGTH, COUNT, PROMPT = 6, 3, 1100, [1, 4, 2]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "many": {
        "temperature": 1.2, "top_k": 4, "repetition_penalty": 1.4, "logit_bias": {3: 1.0},
        "min_p": 0.06,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, a draft model that is roughly right, an EAGLE-3 head with four of six tokens."""
    folder = tmp_path_factory.mktemp("models")
    save_llama(folder / "target", layers=4, std=0.15, vocab_size=V)
    save_llama(folder / "draft_model", seed=5, layers=1, std=0.15, vocab_size=V)
    weights = head_weights(eagle3=True, vocab_size=V, draft_vocab_size=4)
    weights["lm_head.weight"] *= -0.3
    sizes = {"vocab_size": V, "draft_vocab_size": 4}
    taps = {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
    save_head(folder / "eagle3", weights, True, **sizes, **taps)
    return folder


def processed(logits: Tensor, tokens: list[int], options: dict[str, Any]) -> Tensor:
    """One row's distribution [V], as the options define it."""
    for token, bias in options.get("logit_bias", {}).items():
        logits[token] += bias
    penalty = options.get("repetition_penalty", 1.0)
    for token in set(tokens):
        logits[token] = logits[token] / penalty if logits[token] > 0 else logits[token] * penalty
    logits = logits / options["temperature"]
    if "top_k" in options:
        logits[logits < logits.topk(options["top_k"]).values[-1]] = float("-inf")
    p = logits.softmax(-1)
    if "min_p" in options:
        p[p < options["min_p"] * p.max()] = 0.0
    return p / p.sum()


def exact_law(target: Path, options: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """The probability of each continuation of LENGTH tokens."""
    model = LlamaForCausalLM.from_pretrained(target).eval()
    law = {(): 1.0}
    for _ in range(LENGTH):
        grown = {}
        for prefix, mass in law.items():
            tokens = [*PROMPT, *prefix]
            with torch.no_grad():
                logits = model(torch.tensor([tokens])).logits[0, -1]
            for token, p in enumerate(processed(logits, tokens, options).tolist()):
                grown[(*prefix, token)] = mass * p
        law = grown
    return law


def p_value(counts: Counter[tuple[int, ...]], law: dict[tuple[int, ...], float]) -> float:
    """Chi-square; rare continuations are one cell."""
    common = [key for key, p in law.items() if p * COUNT >= 5]
    observed = [counts[key] for key in common]
    expected = [law[key] * COUNT for key in common]
    if (rest := COUNT - sum(expected)) > 5:
        observed.append(COUNT - sum(observed))
        expected.append(rest)
    else:
        scale = sum(observed) / sum(expected)
        expected = [value * scale for value in expected]
    return float(chisquare(observed, expected).pvalue)


def emitted(
    folder: Path, method: str, sampling: str, options: dict[str, Any]
) -> tuple[Counter[tuple[int, ...]], float]:
    """The tokens of COUNT requests with different seeds, and the acceptance rate."""
    config = SpeculativeConfig(
        method=method.replace("other", "draft"),
        model=str(folder / method),
        num_speculative_tokens=2,
        draft_sampling=sampling,
    )
    scheduler = {"max_num_seqs": 160, "max_num_batched_tokens": 640}
    cache = {"num_gpu_blocks_override": 1200}
    engine = TinyEngine(folder / "target", config, scheduler=scheduler, cache=cache)
    run = engine.run([PROMPT] * COUNT, max_tokens=LENGTH, **options)
    engine.close()
    return Counter(tuple(tokens) for tokens in run.tokens.values()), run.accepted / run.drafted


@pytest.mark.parametrize(
    ("method", "sampling", "option"),  # every two of them meet
    some(
        [
            ("draft_model", "greedy", "many"),
            ("draft_model", "probabilistic", "plain"),
            ("eagle3", "greedy", "plain"),
            ("eagle3", "probabilistic", "many"),
        ],
        kept=[("draft_model", "greedy", "many"), ("eagle3", "probabilistic", "many")],
    ),
)
def test_trap_07_three_tokens_follow_the_joint_law(
    folder: Path, method: str, sampling: str, option: str
) -> None:
    """The first comes from the prompt's row, the others are accepted, recovered or bonus tokens."""
    options = OPTIONS[option]
    law = exact_law(folder / "target", options)
    counts, rate = emitted(folder, method, sampling, options)
    assert sum(counts.values()) == COUNT and 0.1 < rate < 0.95
    assert all(law[key] > 0 for key in counts)
    assert p_value(counts, law) > 1e-4
    # the law is not that of any token alone: a uniform guess is seen
    uniform = dict.fromkeys(itertools.product(range(V), repeat=LENGTH), V**-LENGTH)
    assert p_value(counts, uniform) < 1e-12


def test_a_wrong_q_would_be_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: drafts come from q, but a sharper distribution is kept for verification."""
    draw = base.draw_drafts

    def sharper(logits: Tensor, of: Any, to_target: Any, kept: Any) -> None:
        place = (of.idx_mapping[: logits.shape[0]], of.step[: logits.shape[0]].clone())
        draw(logits, of, to_target, kept)
        kept[place] *= 3

    monkeypatch.setattr(base, "draw_drafts", sharper)
    counts, _ = emitted(folder, "draft_model", "probabilistic", OPTIONS["plain"])
    assert p_value(counts, exact_law(folder / "target", OPTIONS["plain"])) < 1e-4
