"""The counter-based noise has good quality and depends only on its counters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import chisquare, kstest
from torch import Tensor

from slipstream.kernels.sampling.sample import (
    ACCEPT,
    DRAFT,
    RECOVERY,
    TARGET,
    gumbel_noise,
    gumbel_sample,
    row_keys,
    token_bits,
    uniform,
)

N, V = 1000, 512
COUNTER = torch.arange(N)
CONSTANT = torch.full((N,), 7)
# (seeds, positions): one counter varies, the other is constant
STREAMS = {
    "positions": (CONSTANT, COUNTER),
    "seeds": (COUNTER, CONSTANT),
    "high seed bits": (COUNTER << 32, CONSTANT),
    "negative seeds": (-COUNTER, CONSTANT),
    "both": (COUNTER, COUNTER),
}


def numbers(seeds: Tensor, positions: Tensor, salt: int = TARGET) -> np.ndarray:
    bits = token_bits(row_keys(seeds, positions, salt), V)
    return (bits.long() & 0xFFFFFFFF).numpy() / 2.0**32


def correlation(a: np.ndarray, b: np.ndarray) -> float:
    """The correlation of two series, in standard deviations."""
    return float(np.corrcoef(a.ravel(), b.ravel())[0, 1] * a.size**0.5)


@pytest.mark.parametrize("stream", STREAMS)
def test_numbers_are_uniform_and_neighbours_are_independent(stream: str) -> None:
    u = numbers(*STREAMS[stream])
    assert chisquare(np.histogram(u, 256, (0, 1))[0]).pvalue > 1e-4
    low_bits = np.histogram(u * 2**16 % 1, 256, (0, 1))[0]
    assert chisquare(low_bits).pvalue > 1e-4
    next_token, next_row, both = (u[:, 1:], u[:, :-1]), (u[1:], u[:-1]), (u[1:, 1:], u[:-1, :-1])
    for a, b in (next_token, next_row, both):
        assert abs(correlation(a, b)) < 4.5
        joint = np.histogram2d(a.ravel(), b.ravel(), 32, [[0, 1], [0, 1]])[0]
        assert chisquare(joint.ravel()).pvalue > 1e-4
    # sums along either axis vary like sums of independent numbers
    for sums, count in ((u.sum(1), V), (u.sum(0), N)):
        assert kstest((sums - count / 2) / (count / 12) ** 0.5, "norm").pvalue > 1e-4


def test_salts_give_independent_streams() -> None:
    streams = [numbers(COUNTER, CONSTANT, salt) for salt in (TARGET, ACCEPT, RECOVERY, DRAFT)]
    for i, a in enumerate(streams):
        for b in streams[:i]:
            assert abs(correlation(a, b)) < 4.5
    per_row = row_keys(COUNTER, CONSTANT, torch.full((N,), DRAFT))
    assert torch.equal(per_row, row_keys(COUNTER, CONSTANT, DRAFT))


def test_no_two_rows_share_a_key() -> None:
    positions = torch.arange(200).repeat(500)
    seeds = torch.arange(500).repeat_interleave(200)
    keys = row_keys(seeds, positions, TARGET).long()
    assert (keys[:, 0] * 2**32 + keys[:, 1]).unique().numel() == positions.numel()


def test_gumbel_noise_is_finite_and_has_its_law() -> None:
    noise = gumbel_noise(row_keys(COUNTER, CONSTANT, TARGET), V)
    assert noise.isfinite().all()
    assert kstest(noise[:200].numpy().ravel(), lambda x: np.exp(-np.exp(-x))).pvalue > 1e-4
    extremes = torch.tensor([[0, 1]], dtype=torch.int32)
    assert gumbel_noise(extremes, V).isfinite().all()
    u = uniform(torch.arange(200_000), torch.zeros(200_000, dtype=torch.int64), ACCEPT)
    assert 0 < u.min() and u.max() < 1 and abs(u.mean() - 0.5) < 0.003


def test_tokens_do_not_depend_on_the_row_the_batch_or_padding() -> None:
    torch.manual_seed(0)
    logits = torch.randn(64, 1000)
    seeds, positions = torch.randint(-(2**62), 2**62, (64,)), torch.randint(0, 4096, (64,))
    tokens = gumbel_sample(logits, seeds, positions, TARGET)
    order = torch.randperm(64)
    shuffled = gumbel_sample(logits[order], seeds[order], positions[order], TARGET)
    assert torch.equal(shuffled, tokens[order])
    alone = [
        gumbel_sample(logits[i : i + 1], seeds[i : i + 1], positions[i : i + 1], TARGET)
        for i in range(64)
    ]
    assert torch.equal(torch.cat(alone), tokens)
    wider = torch.cat([logits, torch.full((64, 24), -torch.inf)], 1)
    assert torch.equal(gumbel_sample(wider, seeds, positions, TARGET), tokens)
    assert tokens.unique().numel() > 50


def test_greedy_rows_take_the_argmax() -> None:
    logits = torch.randn(10, 100)
    greedy = torch.arange(10) % 2 == 0
    tokens = gumbel_sample(logits, torch.arange(10), torch.arange(10), TARGET, greedy)
    assert torch.equal(tokens[greedy], logits.argmax(-1)[greedy])
    assert not torch.equal(tokens[~greedy], logits.argmax(-1)[~greedy])


def test_the_bits_are_pinned() -> None:
    """Changing the hash changes the output for every seed, so it must be intentional."""
    bits = token_bits(row_keys(torch.tensor([1234]), torch.tensor([56]), TARGET), 3)
    assert bits.tolist() == [[-435118590, -1976129617, 227021488]]
