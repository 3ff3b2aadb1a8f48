"""Claims of attention back ends, measured on the CPU with recorded graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.configs.graphs import AttentionCGSupport, BatchExecutionDescriptor
from slipstream.runner.attention.base import (
    AttentionBackend,
    AttentionBuilder,
    AttentionLayer,
    AttentionMetadata,
    CommonAttentionMetadata,
)
from slipstream.runner.attention.reference import (
    ReferenceBackend,
    ReferenceBuilder,
    ReferenceMetadata,
)
from slipstream.runner.claims.case import ClaimSetup, check_claim
from slipstream.runner.claims.claims import LoweredClaim
from slipstream.runner.graphs.capture import GraphPool
from slipstream.runner.graphs.recorder import RecordedGraphs

CPU = torch.device("cpu")


class MaskedMetadata(AttentionMetadata):
    """Attention over all slots with a mask.

    It uses only torch operations, so a graph may contain it.
    """

    def __init__(self, common: CommonAttentionMetadata) -> None:
        self.common = common

    def attend(
        self, layer: AttentionLayer, query: Tensor, key: Any, value: Any, kv_cache: Tensor
    ) -> Tensor:
        common, page = self.common, kv_cache.shape[2]
        slots = common.slot_mapping
        keys, values = kv_cache.flatten(1, 2)
        for cache, rows in ((keys, key), (values, value)):
            target = slots.clamp(min=0)  # slot 0 is in the null block, which nobody reads
            cache.index_copy_(
                0, target, torch.where(slots[:, None, None] >= 0, rows, cache[target])
            )
        tokens = torch.arange(query.shape[0])
        row = torch.searchsorted(common.query_start_loc[1:], tokens.int(), right=True)
        row = row.clamp(max=common.num_reqs - 1)
        ends = common.query_start_loc[row + 1]
        last = common.seq_lens[row] - ends + tokens
        at = torch.arange(common.block_table.shape[1] * page)
        table = common.block_table.long()[row][:, at // page] * page + at % page
        group = layer.num_heads // layer.num_kv_heads
        scores = torch.einsum("thd,tshd->ths", query, keys[table].repeat_interleave(group, 2))
        hidden = at > last[:, None]
        scores = (scores * layer.scale).masked_fill(hidden[:, None], -1e30)
        return torch.einsum(
            "ths,tshd->thd", scores.softmax(-1), values[table].repeat_interleave(group, 2)
        )


class MaskedBuilder(AttentionBuilder):
    supports = AttentionCGSupport.ALWAYS

    def build(
        self, common: CommonAttentionMetadata, desc: BatchExecutionDescriptor | None = None
    ) -> MaskedMetadata:
        return MaskedMetadata(common)


class MaskedBackend(ReferenceBackend):
    name = "masked"

    def create_builder(self, *args: Any) -> Any:
        return MaskedBuilder()


class BoastfulBuilder(ReferenceBuilder):
    """The reference plans on the host, so a graph keeps the plan of its capture."""

    supports = AttentionCGSupport.ALWAYS

    def build(
        self, common: CommonAttentionMetadata, desc: BatchExecutionDescriptor | None = None
    ) -> ReferenceMetadata:
        metadata = super().build(common, desc)
        _ = metadata._plan, metadata._written  # not at the first use, which is being captured
        return metadata


class BoastfulBackend(ReferenceBackend):
    name = "boastful"

    def create_builder(
        self,
        layers: Sequence[AttentionLayer],
        block_size: int,
        max_num_reqs: int,
        max_num_tokens: int,
        max_model_len: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> ReferenceBuilder:
        return BoastfulBuilder(block_size, layers[0].sliding_window, dtype)


@pytest.mark.parametrize(
    ("backend", "verified"),
    [(MaskedBackend(), AttentionCGSupport.ALWAYS), (BoastfulBackend(), AttentionCGSupport.NEVER)],
    ids=["honest", "boastful"],
)
def test_t6_claims_are_measured(backend: AttentionBackend, verified: AttentionCGSupport) -> None:
    layer = AttentionLayer(0, 2, 1, 8, scale=0.3)
    lowered: list[LoweredClaim] = []
    setup = ClaimSetup(max_len=160, num_reqs=3, mixed_tokens=20)
    pool = GraphPool(RecordedGraphs())
    with torch.inference_mode():
        got = check_claim(backend, layer, [1, 3], pool, setup, torch.float32, CPU, lowered.append)
    assert got is verified
    assert [one.verified for one in lowered] == ([] if got is AttentionCGSupport.ALWAYS else [got])
