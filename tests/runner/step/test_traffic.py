"""What a step reads: every weight once, a gathered table not at all unless the head is tied."""

from __future__ import annotations

import torch
from torch import nn

from slipstream.runner.models.layers import Embedding, WeightFormat
from slipstream.runner.models.moe import Experts
from slipstream.runner.step.traffic import expert_bytes, weight_bytes


class _Tiny(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        fmt = WeightFormat(torch.device("cpu"), torch.float32)
        self.embed = Embedding(10, 4, fmt)
        self.register_buffer("cos_sin_cache", torch.zeros(99))
        self.head = nn.Linear(4, 10, bias=False)
        if tied:
            self.head.weight = nn.Parameter(self.embed.weight)


def test_weights_are_counted_once() -> None:
    assert weight_bytes(_Tiny(tied=False)) == 10 * 4 * 4
    assert weight_bytes(_Tiny(tied=True)) == 10 * 4 * 4


def test_experts_are_counted_apart() -> None:
    model = _Tiny(tied=False)
    assert expert_bytes(model) == (0, 0.0)
    fmt = WeightFormat(torch.device("cpu"), torch.float32)
    model.experts = Experts(8, 4, 6, fmt)
    model.experts.expert_share = 0.25
    assert weight_bytes(model) == 10 * 4 * 4
    assert expert_bytes(model) == (8 * 3 * 6 * 4 * 4, 0.25)
