"""The fuzz of `--batch-invariant`: requests in random companies, with random K, chunks, preemptions
and cached prefixes, against each one alone without any of it. All must be bitwise equal."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
import transformers

from slipstream.configs.schema import SpeculativeConfig
from slipstream.runner.messages import AddRequest, SamplingParams, TokenLogprobs

from .tiny_engine import TinyEngine

VOCAB, MAX_LEN = 256, 128
SHAPE: dict[str, Any] = dict(
    vocab_size=VOCAB, hidden_size=96, num_hidden_layers=2, num_attention_heads=6,
    num_key_value_heads=2, max_position_embeddings=MAX_LEN, initializer_range=0.2,
    tie_word_embeddings=False, eos_token_id=None, bos_token_id=None, intermediate_size=200,
)  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Llama": {"head_dim": 16},
    "Qwen3Moe": dict(
        head_dim=16, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=40,
        norm_topk_prob=True, mlp_only_layers=[1],
    ),
    "DeepseekV3": dict(
        num_key_value_heads=6, q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=16,
        qk_rope_head_dim=16, v_head_dim=16, n_routed_experts=8, n_shared_experts=1,
        num_experts_per_tok=2, n_group=4, topk_group=2, moe_intermediate_size=40,
        first_k_dense_replace=1, num_mtp_layers=0,
    ),
    "Gemma3Text": dict(head_dim=16, sliding_window=24, layer_types=[
        "sliding_attention", "full_attention",
    ]),
}  # fmt: skip
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 3},
    {"temperature": 0.9, "logprobs": 5, "has_own_seed": True},
    {"temperature": 1.0, "top_p": 0.8, "logprobs": 0},
    {"temperature": 0.8, "top_k": 7, "top_p": 0.95, "min_p": 0.01},
    {"temperature": 0.7, "presence_penalty": 0.4, "repetition_penalty": 1.2, "logprobs": 2},
    {"temperature": 0.0, "logit_bias": {5: 2.0}, "frequency_penalty": 0.3},
)


def save_model(kind: str, folder: Path) -> Path:
    """A tiny random model of this kind; returns its folder."""
    torch.manual_seed(3)
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **MODELS[kind]})
    name = kind.removesuffix("Text") + "ForCausalLM"
    getattr(transformers, name)(config).save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Ask:
    """A request."""

    prompt: tuple[int, ...]
    sampling: SamplingParams


@dataclass
class Outcome:
    """What a request got: its tokens, and for each token its log probabilities."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[tuple[Any, ...]] = field(default_factory=list)

    def add(self, token_ids: Sequence[int], rows: Sequence[TokenLogprobs] | None) -> None:
        self.tokens.extend(token_ids)
        for row in rows or ():
            top = zip(row.top_ids, row.top_logprobs, strict=True)
            self.logprobs.append((row.token_id, row.logprob, row.rank, *top))


def asks(rng: random.Random, count: int, longest: int, vocab: int, most: int = 24) -> list[Ask]:
    """Random requests. Prompts repeat themselves, so that n-grams are found, and share prefixes."""
    shared = [rng.randrange(vocab) for _ in range(40)]
    found = []
    for number in range(count):
        piece = [rng.randrange(vocab) for _ in range(rng.randint(1, 6))]
        prompt = (shared if rng.random() < 0.5 else []) + piece * 12
        prompt = prompt[: rng.randint(1, longest)]
        options = OPTIONS[number % len(OPTIONS)]
        sampling = SamplingParams(seed=number, max_tokens=rng.randint(4, most), **options)
        found.append(Ask(tuple(prompt), sampling))
    return found


def serve(
    engine: TinyEngine,
    wanted: Sequence[Ask],
    rng: random.Random,
    known: Sequence[Outcome] = (),
) -> tuple[list[Outcome], int]:
    """Serve requests that arrive at random moments: their outcomes, and the accepted drafts.

    With `known` outcomes, some requests predict their text, so that more n-grams are right.
    """
    outcomes = [Outcome() for _ in wanted]
    waiting = list(range(len(wanted)))
    rng.shuffle(waiting)
    accepted = 0
    while waiting or engine.engine.has_work():
        while waiting and (rng.random() < 0.3 or not engine.engine.has_work()):
            index = waiting.pop()
            ask = wanted[index]
            sampling = ask.sampling
            if known and rng.random() < 0.6:
                text = known[index].tokens
                sampling = msgspec.structs.replace(sampling, prediction_token_ids=text)
            message = AddRequest(str(index), list(ask.prompt), sampling)
            engine.engine.handle([message])
        for step in engine.engine.step():
            accepted += step.stats.num_accepted_tokens
            for output in step.outputs:
                assert output.error is None, output.error
                outcomes[int(output.request_id)].add(output.token_ids, output.logprobs)
    engine.synchronize()
    return outcomes, accepted


def engine_of(
    folder: Path,
    drafter: SpeculativeConfig,
    seqs: int,
    tokens: int,
    blocks: int,
    caching: bool,
    **changes: Any,
) -> TinyEngine:
    graph = {"batch_invariant": True} | changes.pop("graph", {})
    if sizes := graph.get("cudagraph_capture_sizes"):
        graph["cudagraph_capture_sizes"] = tuple(size for size in sizes if size <= tokens)
    cache = {"block_size": 16, "num_gpu_blocks_override": blocks, "enable_prefix_caching": caching}
    cache |= changes.pop("cache", {})
    limits = {"max_num_seqs": seqs, "max_num_batched_tokens": tokens}
    return TinyEngine(folder, drafter, graph=graph, cache=cache, scheduler=limits, **changes)


def check(
    folder: Path,
    rounds: int,
    seed: int,
    drafters: Sequence[SpeculativeConfig] = (),
    count: int = 10,
    longest: int = 70,
    vocab: int = VOCAB,
    **changes: Any,
) -> int:
    """Compare `rounds` random engines with `count` requests one at a time, of prompts of up to
    `longest` tokens.

    Returns the number of accepted drafts.
    """
    rng = random.Random(f"{folder.name} {seed}")
    wanted = asks(rng, count, longest, vocab)
    plain = engine_of(folder, SpeculativeConfig(), 1, 512, 60, False, **dict(changes))
    expected = [serve(plain, [ask], rng)[0][0] for ask in wanted]
    plain.close()
    assert all(
        len(e.tokens) == a.sampling.max_tokens for e, a in zip(expected, wanted, strict=True)
    )
    accepted = 0
    for number in range(rounds):
        k = rng.choice([1, 2, 3, 5])
        options: dict[str, Any] = {"num_speculative_tokens": k, "watchdog": False}
        drafter = SpeculativeConfig(method="ngram", prompt_lookup_min=1, **options)
        if drafters and number % 2:
            drafter = rng.choice(drafters)
        seqs = rng.choice([2, 3, 6])
        most = max(seqs * (drafter.max_drafts + 1), rng.choice([16, 24, 64, 300]))
        blocks = rng.choice([10, 14, 60])  # the longest request needs 7
        engine = engine_of(folder, drafter, seqs, most, blocks, number % 2 == 0, **dict(changes))
        for again in range(2):  # the second time with cached prefixes
            got, more = serve(engine, wanted, rng, expected)
            accepted += more
            for index, (mine, alone) in enumerate(zip(got, expected, strict=True)):
                where = (
                    f"request {index} of round {number}.{again}: K={k}, {seqs} seqs, {most} tokens"
                )
                assert mine.tokens == alone.tokens, where
                assert mine.logprobs == alone.logprobs, where
        engine.close()
    assert accepted > 0, "no draft was accepted"
    return accepted
