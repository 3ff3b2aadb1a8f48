"""Claims of attention back ends, measured on the CPU with recorded graphs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.configs.graphs import AttentionCGSupport, BatchExecutionDescriptor, CUDAGraphMode
from slipstream.kernels.attention.compressed.pages import Pages
from slipstream.runner.attention.base import (
    AttentionBackend,
    AttentionBuilder,
    AttentionLayer,
    AttentionMetadata,
    BuilderSizes,
    CommonAttentionMetadata,
)
from slipstream.runner.attention.fp8_layers import with_fp8_cache
from slipstream.runner.attention.reference import (
    ReferenceBackend,
    ReferenceBuilder,
    ReferenceMetadata,
)
from slipstream.runner.attention.triton import TritonBackend
from slipstream.runner.claims.case import ClaimSetup, ClaimTrial
from slipstream.runner.claims.claims import LoweredClaim
from slipstream.runner.graphs.capture import GraphPool

from ..graphs.recorder import RecordedGraphs
from .checked_claim import check_claim

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
        self, layers: Sequence[AttentionLayer], sizes: BuilderSizes
    ) -> ReferenceBuilder:
        return BoastfulBuilder(sizes.block_size, layers[0].sliding_window, sizes.dtype)


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


LISTED = AttentionLayer(
    0, 4, 1, 48, scale=0.3, is_mla=True, head_dim_v=32, reads_lists=True
)  # DeepSeek V3.2's
RAW = AttentionLayer(
    0, 4, 1, 32, scale=0.3, is_mla=True, head_dim_v=32, sliding_window=20, rotary_tail=8,
    sinks=torch.tensor([0.5, -1.0, 0.0, 2.0]),
)  # fmt: skip


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("layer", [LISTED, RAW], ids=["v32", "v4"])
def test_trials_of_listed_rows_attend_to_what_their_cache_holds(
    layer: AttentionLayer, fp8: bool
) -> None:
    if fp8:
        layer = with_fp8_cache([layer], torch.float32, {})[0]
    setup = ClaimSetup(max_len=48, num_reqs=3, mixed_tokens=20)
    trial = ClaimTrial(
        TritonBackend(), layer, setup, torch.float32, CPU, GraphPool(RecordedGraphs())
    )
    lens = [40, 1, 17]
    common = trial.fill(BatchExecutionDescriptor(CUDAGraphMode.FULL, 3, 3, 1), [1] * 3, lens)
    got = trial.forward(3, trial.state(trial.builder.build(common)))
    pages = Pages(trial.cache, trial.block_table, trial.slot_mapping, 16, 1, layer.fp8)
    for request, length in enumerate(lens):
        first = max(0, length - (layer.sliding_window or length))
        at = torch.arange(first, length)[None]
        rows = pages.gather(pages.slots_of(torch.tensor([request]), at))[0]
        scores = trial.query[request] @ rows.T * layer.scale  # [H, S]
        if layer.sinks is not None:
            scores = torch.cat((scores, layer.sinks[:, None]), 1)
        expected = scores.softmax(1)[:, : len(rows)] @ rows[:, :32]
        torch.testing.assert_close(got[request], expected, atol=1e-5, rtol=1e-4)
