"""Shared by the sampler's tests: request rows, many draws at once, a toy model, a naive oracle."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from slipstream.configs.schema import SpeculativeConfig
from slipstream.runner.batch.ragged_rows import RaggedRows
from slipstream.runner.batch.sampling_state import SamplingState
from slipstream.runner.messages import SamplingParams
from slipstream.runner.sampling.sampler import Sampler, SamplerOutput, SamplingRows

CPU = torch.device("cpu")


@dataclass
class Table:
    """The request table as the sampler sees it, and what `post_update` writes."""

    all_token_ids: Tensor
    prompt_len: Tensor
    prefill_len: Tensor
    total_len: Tensor
    sampling: SamplingState
    draft_logits: Tensor | None = None

    @classmethod
    def of(
        cls,
        requests: Sequence[tuple[SamplingParams, list[int], list[int]]],
        vocab_size: int,
        device: torch.device = CPU,
    ):
        """One slot per (params, prompt, output so far)."""
        count = len(requests)
        state = SamplingState(count, vocab_size, device)
        tokens = torch.full((count, 128), 3, dtype=torch.int32)
        for slot, (params, prompt, output) in enumerate(requests):
            state.set_request(slot, params, prompt, output)
            known = [*prompt, *output]
            tokens[slot, : len(known)] = torch.tensor(known)
        prompts = torch.tensor([len(prompt) for _, prompt, _ in requests], dtype=torch.int32)
        total = torch.tensor([len(p) + len(o) for _, p, o in requests], dtype=torch.int32)
        columns = (tokens, prompts, total.clone(), total)
        return cls(*(column.to(device) for column in columns), state)

    @classmethod
    def repeated(
        cls,
        params: SamplingParams,
        prompt: list[int],
        output: list[int],
        count: int,
        vocab_size: int,
    ):
        """`count` slots with the same request and the seeds 0 .. count - 1."""
        one = cls.of([(params, prompt, output)], vocab_size)
        state = SamplingState(count, vocab_size, CPU)
        for name, value in vars(one.sampling).items():
            if isinstance(value, Tensor) and value.shape[0] == 1:
                setattr(state, name, value.expand(count, *value.shape[1:]).clone())
            elif isinstance(value, RaggedRows):  # all slots have the same list
                lists = getattr(state, name)
                lists.entries = value.entries
                lists._bounds_cpu[:] = value._bounds_cpu
                lists._bounds.copy_(value._bounds)
            elif isinstance(value, list):
                setattr(state, name, value * count)
        for name in ("temperature", "top_p", "min_p", "presence", "frequency", "repetition"):
            getattr(state, name).fill_(getattr(one.sampling, name).item())
        for name in ("top_k", "min_tokens"):
            getattr(state, name).fill_(getattr(one.sampling, name).item())
        state.seed.copy_(torch.arange(count))
        columns = (one.all_token_ids, one.prompt_len, one.prefill_len, one.total_len)
        return cls(*(c.expand(count, *c.shape[1:]).clone() for c in columns), state)

    def apply(self, rows: SamplingRows, output: SamplerOutput) -> list[list[int]]:
        """What post_update does to these columns; returns the emitted tokens per batch row."""
        count_tokens(self.sampling, rows.idx_mapping, output)
        emitted = [
            ids[:count]
            for ids, count in zip(
                output.sampled_token_ids.tolist(), output.num_sampled.tolist(), strict=True
            )
        ]
        for slot, tokens in zip(rows.slots, emitted, strict=True):
            at = int(self.total_len[slot])
            self.all_token_ids[slot, at : at + len(tokens)] = torch.tensor(tokens)
            self.total_len[slot] += len(tokens)
        return emitted


def count_tokens(sampling: SamplingState, slots: Tensor, output: SamplerOutput) -> None:
    """Count the emitted tokens of each request, as `post_update` does on the device."""
    if (counts := sampling.output_bin_counts) is None:
        return
    emitted = output.sampled_token_ids >= 0
    rows = slots.long()[:, None].expand_as(emitted)[emitted]
    one = counts.new_ones(()).expand(rows.shape[0])
    counts.index_put_((rows, output.sampled_token_ids[emitted]), one, accumulate=True)


def rows_of(
    table: Table, slots: Sequence[int], drafts: Sequence[Sequence[int]], max_num_drafts: int
) -> SamplingRows:
    """A verify step: every request's newest token, then its drafts."""
    counts = torch.tensor([len(of) + 1 for of in drafts])
    cu = torch.zeros(len(drafts) + 1, dtype=torch.int32)
    cu[1:] = counts.cumsum(0)
    slot_ids = torch.tensor(slots, dtype=torch.int32)
    local = torch.cat([torch.arange(int(n), dtype=torch.int32) for n in counts])
    expanded = slot_ids.repeat_interleave(counts)
    return SamplingRows(
        slots=list(slots),
        idx_mapping=slot_ids,
        cu_num_logits=cu,
        cu_num_logits_cpu=cu.tolist(),
        expanded_idx_mapping=expanded,
        expanded_local_pos=local,
        positions=table.total_len[expanded.long()].long() - 1 + local,
        draft_ids=torch.tensor([d for of in drafts for d in [*of, -1]]),
        seq_lens=table.total_len[slot_ids.long()] + counts.int() - 1,
        max_num_drafts=max_num_drafts,
    )


def rows_on(rows: SamplingRows, device: torch.device) -> SamplingRows:
    """The same step with its tensors elsewhere."""
    moved = {k: v.to(device) for k, v in vars(rows).items() if isinstance(v, Tensor)}
    return replace(rows, **moved)


def uniform_rows(table: Table, drafts: Tensor) -> SamplingRows:
    """A fast `rows_of` for all slots, with drafts [N, K]."""
    count, num_drafts = drafts.shape
    width = num_drafts + 1
    slots = torch.arange(count, dtype=torch.int32)
    local = torch.arange(width, dtype=torch.int32).repeat(count)
    expanded = slots.repeat_interleave(width)
    cu = torch.arange(count + 1, dtype=torch.int32) * width
    return SamplingRows(
        slots=slots.tolist(),
        idx_mapping=slots,
        cu_num_logits=cu,
        cu_num_logits_cpu=cu.tolist(),
        expanded_idx_mapping=expanded,
        expanded_local_pos=local,
        positions=table.total_len[expanded.long()].long() - 1 + local,
        draft_ids=torch.cat([drafts, torch.full((count, 1), -1)], 1).flatten(),
        seq_lens=table.total_len + num_drafts,
        max_num_drafts=num_drafts,
    )


def sampler(max_chunk_bytes: int = 1 << 28, **options: object) -> Sampler:
    return Sampler(SpeculativeConfig(**options), CPU, max_chunk_bytes)  # type: ignore[arg-type]


def expected_distribution(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],  # everything emitted before the token, accepted drafts too
    mask: Sequence[bool] | None = None,
) -> np.ndarray:
    """The distribution of one token, option by option, token by token, in float64."""
    values = [float(x) for x in logits]
    vocab = range(len(values))
    if mask is not None:
        values = [x if ok else -math.inf for x, ok in zip(values, mask, strict=True)]
    for token, bias in params.logit_bias.items():
        values[token] += bias
    if params.allowed_token_ids is not None:
        values = [x if t in params.allowed_token_ids else -math.inf for t, x in enumerate(values)]
    if len(output) < params.min_tokens:
        values = [-math.inf if t in params.stop_token_ids else x for t, x in enumerate(values)]
    for token in vocab:
        count = list(output).count(token)
        if count or token in prompt:
            factor = params.repetition_penalty
            values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
        values[token] -= count * params.frequency_penalty
        values[token] -= params.presence_penalty if count else 0.0
    for word in params.bad_words_token_ids:
        before = word[:-1]
        if len(output) >= len(before) and list(output[len(output) - len(before) :]) == before:
            values[word[-1]] = -math.inf
    if params.temperature == 0:
        best = max(vocab, key=lambda t: values[t])
        return np.array([float(t == best) for t in vocab])
    values = [x / params.temperature for x in values]
    top = max(values)
    weights = np.array([math.exp(x - top) for x in values])
    weights[weights < params.min_p] = 0.0  # relative to the most likely token
    order = np.argsort(-weights)
    if params.top_k:
        weights[order[params.top_k :]] = 0.0
    probs = weights / weights.sum()
    mass = 0.0
    for token in order:
        if mass >= params.top_p:
            probs[token] = 0.0
        mass += probs[token]
    return probs / probs.sum()


def assert_law(tokens: np.ndarray | Tensor, probs: np.ndarray, limit: float = 1e-4) -> None:
    """Chi-square of drawn tokens against `probs`; tokens of probability 0 must not occur."""
    from scipy.stats import chisquare

    counts = np.bincount(np.asarray(tokens), minlength=len(probs))
    total = counts.sum()
    assert total > 300, "too few draws to tell"
    assert counts[probs < 1e-12].sum() == 0
    expected = probs * total
    common = expected >= 5
    observed = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    if wanted[-1] < 5:  # too few to judge by
        observed, wanted = observed[:-1], wanted[:-1] * observed[:-1].sum() / wanted[:-1].sum()
    if len(observed) > 1:
        pvalue = chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue
        assert pvalue > limit, f"p = {pvalue}, {observed} for {wanted.round(1)}"


@dataclass
class ToyModel:
    """Logits are a function of the last two tokens."""

    vocab_size: int
    scale: float = 2.0
    weights: Tensor = field(init=False)

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        shape = (self.vocab_size, self.vocab_size, self.vocab_size)
        self.weights = torch.randn(shape, generator=generator) * self.scale

    def logits(self, tokens: Sequence[int]) -> Tensor:
        return self.weights[tokens[-2], tokens[-1]]


Drafter = Callable[[int, list[int]], list[int]]  # (slot, tokens so far) -> drafts


def generate(
    requests: Sequence[tuple[SamplingParams, list[int]]],
    drafter: Drafter,
    num_tokens: int,
    model: ToyModel,
    max_num_drafts: int,
    order: Callable[[int], list[int]] | None = None,  # step -> slots of the batch
    **options: object,
) -> list[list[int]]:
    """Run all requests to `num_tokens` output tokens through the sampler, step by step."""
    table = Table.of([(params, prompt, []) for params, prompt in requests], model.vocab_size)
    judge = sampler(**options)
    tokens = [list(prompt) for _, prompt in requests]
    target = [len(prompt) + num_tokens for _, prompt in requests]
    step = 0
    while any(len(known) < end for known, end in zip(tokens, target, strict=True)):
        slots = list(range(len(requests))) if order is None else order(step)
        slots = [slot for slot in slots if len(tokens[slot]) < target[slot]]
        step += 1
        assert step < 50 * num_tokens
        if not slots:
            continue
        drafts = [drafter(slot, tokens[slot])[:max_num_drafts] for slot in slots]
        rows = rows_of(table, slots, drafts, max_num_drafts)
        logits = torch.stack(
            [
                model.logits([*tokens[slot], *(max(d, 0) for d in of[:j])])
                for slot, of in zip(slots, drafts, strict=True)
                for j in range(len(of) + 1)
            ]
        )
        for slot, emitted in zip(
            slots, table.apply(rows, judge.sample(logits, rows, table)), strict=True
        ):
            assert emitted
            tokens[slot].extend(emitted)
    return [
        known[len(prompt) : len(prompt) + num_tokens]
        for known, (_, prompt) in zip(tokens, requests, strict=True)
    ]
