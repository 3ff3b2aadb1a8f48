"""A head that ranks share picks the tokens of a whole one, and gathers logits only where needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear.head_sample import Draws, pick_rows
from slipstream.runner.models.formats.weight_format import WeightFormat
from slipstream.runner.models.sharded import SplitHead
from slipstream.runner.parallel.ranks import Ranks

from .threads import on_ranks

CPU = torch.device("cpu")
HIDDEN = 16


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("vocab", [97, 5])  # of 5 tokens, one of four ranks has none
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_pick_the_tokens_of_all_logits(size: int, vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    weight = torch.randn(vocab, HIDDEN, generator=generator).to(dtype)
    weight[vocab - 1] = weight[0]  # a tie between ranks: the lower id
    x = torch.randn(40, HIDDEN, generator=generator).to(dtype)
    x[0] = weight[0] * 9
    temperature = torch.tensor([0.0, 0.7, 1.6, 0.0]).repeat(10)
    seeds, positions = torch.arange(40) * 3, torch.arange(40) + 5
    draws = Draws(seeds, positions, temperature == 0, temperature)

    def run(ranks: Ranks) -> tuple[list[tuple[Tensor, Tensor]], Tensor, Any]:
        head = SplitHead(HIDDEN, vocab, WeightFormat(CPU, dtype, ranks=ranks))
        (slot,) = dict(head.checkpoint_slots("", "lm_head")).values()
        assert slot.cut is not None
        slot.load(slot.cut.of(weight))
        assert head.can_pick
        picked = [head.pick(x, vocab, how) for how in (None, draws)]
        few = head.pick(x, vocab - 2, draws)
        return [*picked, few], head.forward(x), ranks.communicator

    results = on_ranks(size, run)
    logits = results[0][1]
    expected = [pick_rows(logits, None), pick_rows(logits, draws)]
    expected.append(pick_rows(logits[:, : vocab - 2], draws))
    for picked, _, communicator in results:
        for (tokens, largest), (token, top) in zip(picked, expected, strict=True):
            assert torch.equal(tokens, token) and torch.equal(largest, top.float())
        assert picked[0][0][0] == 0
        assert communicator.gathered == [*[(40, 3)] * 3, (40, -(-vocab // size))]


def test_a_missing_number_is_noticed_wherever_it_is() -> None:
    def run(ranks: Ranks) -> Tensor:
        head = SplitHead(HIDDEN, 8, replace(WeightFormat(CPU, torch.float32), ranks=ranks))
        assert head.weight is not None
        head.weight.fill_(float("nan") if ranks.rank else 1.0)
        return head.pick(torch.ones(3, HIDDEN))[1]

    assert all(largest.isnan().all() for largest in on_ranks(2, run))
