"""A mixed batch as two launches of Triton's attention: which batches, and that nothing changes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from slipstream.configs.graphs import BatchExecutionDescriptor, CUDAGraphMode
from slipstream.kernels.attention.paged_attention import paged_attention_reference
from slipstream.kernels.attention.rotary_store_kv import rotary_store_kv_reference
from slipstream.runner.attention.base import AttentionLayer, CommonAttentionMetadata, Rotary
from slipstream.runner.attention.triton import TritonBuilder, mixed_parts

PAGE, HEADS, KV_HEADS, DIM = 16, 4, 2, 32


def batch(query_lens: list[int], seq_lens: list[int], padded: int = 0) -> CommonAttentionMetadata:
    """Requests with the given lengths, and `padded` requests and token rows after them."""
    starts = torch.tensor([0, *query_lens, *[0] * padded]).cumsum(0).int()
    lens = torch.tensor([*seq_lens, *[0] * padded]).int()
    blocks = -(-max(seq_lens) // PAGE)
    table = torch.arange(1, len(lens) * blocks + 1).int().view(len(lens), blocks)
    tokens = int(starts[-1]) + padded
    return CommonAttentionMetadata(
        num_reqs=len(lens),
        num_actual_tokens=tokens,
        max_query_len=max(query_lens),
        max_seq_len=max(seq_lens),
        query_start_loc=starts,
        query_start_loc_cpu=starts.clone(),
        seq_lens=lens,
        seq_lens_cpu_upper_bound=lens.clone(),
        block_table=table,
        slot_mapping=torch.full((tokens,), -1),
    )


@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, about inf and nan
@pytest.mark.parametrize(("decode", "window"), [(1, None), (4, None), (1, 20)])
def test_two_launches_give_what_one_gives(decode: int, window: int | None) -> None:
    from slipstream.kernels.attention.triton.paged_attention import paged_attention

    seq_lens = [5 + 7 * i for i in range(9)] + [40, 70]
    common = batch([decode] * 9 + [17, 33], seq_lens, padded=2)
    layer = AttentionLayer(
        scale=DIM**-0.5, sliding_window=window, layer_id=0, num_heads=HEADS,
        num_kv_heads=KV_HEADS, head_dim=DIM,
    )  # fmt: skip
    rows = TritonBuilder().build(common)._rows
    assert rows.parts is not None
    early, late = rows.parts
    assert early.seq_lens.tolist() == seq_lens[:9] and early.max_query_len == decode
    assert late.query_start_loc.tolist() == [0, 17, 50, 50, 50] and late.max_query_len == 33
    assert late.seq_lens.data_ptr() % 16 == 0 == late.block_table.data_ptr() % 16
    assert late.block_table.stride() == common.block_table.stride()

    tokens = common.num_actual_tokens
    query = torch.randn(tokens, HEADS, DIM)
    cache = torch.randn(2, int(common.block_table.max()) + 1, PAGE, KV_HEADS, DIM)
    got = paged_attention(query, cache, rows, layer)
    expected = paged_attention_reference(query, cache, rows, layer)
    torch.testing.assert_close(got, expected, rtol=3e-6, atol=3e-6)
    assert not got[tokens - 2 :].any()


@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, about inf and nan
@pytest.mark.parametrize("num_parts", [0, 2])  # partial sums of the projection
def test_each_part_of_a_batch_is_rotated_written_and_attended(num_parts: int) -> None:
    """The decodes' part by the fused kernel, the other by two kernels; both write into `out`."""
    common = batch([1] * 9 + [17], [5 + 7 * i for i in range(9)] + [70])
    tokens = common.num_actual_tokens
    common = replace(common, slot_mapping=common.slot_mapping.clone())
    starts = common.query_start_loc.tolist()
    positions = torch.zeros(tokens, dtype=torch.int64)
    for row, (start, end) in enumerate(pairwise(starts)):
        at = torch.arange(end - start) + int(common.seq_lens[row]) - (end - start)
        positions[start:end] = at
        common.slot_mapping[start:end] = common.block_table[row][at // PAGE] * PAGE + at % PAGE
    layer = AttentionLayer(
        scale=DIM**-0.5, layer_id=0, num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=DIM
    )
    rotary = Rotary(positions, torch.randn(128, DIM))
    shape = (num_parts, tokens) if num_parts else (tokens,)
    sizes = [HEADS, KV_HEADS, KV_HEADS]
    query, key, value = torch.randn(*shape, sum(sizes), DIM).split(sizes, dim=-2)
    cache = torch.randn(2, int(common.block_table.max()) + 1, PAGE, KV_HEADS, DIM)
    expected_cache = cache.clone()
    arrivals = torch.zeros(64, dtype=torch.int32)
    metadata = TritonBuilder(arrivals).build(common)
    assert metadata._rows.parts is not None and metadata._rows.parts[0].arrivals is arrivals
    out = torch.full((tokens, HEADS, DIM), float("nan"))
    got = metadata.rotate_and_attend(layer, query, key, value, cache, rotary, out)
    assert got.data_ptr() == out.data_ptr()

    rotated = rotary_store_kv_reference(
        query, key, value, rotary, expected_cache, common.slot_mapping
    )
    whole = metadata._rows
    expected = paged_attention_reference(rotated, expected_cache, whole, layer)
    torch.testing.assert_close(cache, expected_cache, rtol=3e-6, atol=3e-6)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert not arrivals.any()


@pytest.mark.parametrize(
    ("query_lens", "num_early"),
    [
        ([1] * 8 + [17], 8),
        ([4] * 10 + [1, 1, 100, 200], 12),  # verify rows, then decodes, then prefills
        ([1] * 8 + [2, 300], 8),  # a short prefill belongs to the rest
        ([1] * 7 + [300], None),  # too few decodes
        ([1] * 20, None),
        ([20] * 9 + [300], None),
        ([300], None),
    ],
)
def test_a_batch_is_split_after_its_decodes(query_lens: list[int], num_early: int | None) -> None:
    parts = mixed_parts(batch(query_lens, [n + 3 for n in query_lens]))
    if num_early is None:
        assert parts is None
        return
    assert parts is not None
    early, late = parts
    assert early.seq_lens.shape == (num_early,)
    assert late.seq_lens.shape == (len(query_lens) - num_early,)
    assert early.slot_mapping.shape[0] == sum(query_lens[:num_early])


def test_a_full_graph_has_one_launch() -> None:
    """Its capture cannot know where decodes will end."""
    common = batch([1] * 8 + [17], [30] * 9)
    desc = BatchExecutionDescriptor(CUDAGraphMode.FULL, 25, 9)
    assert TritonBuilder().build(common, desc)._rows.parts is None
    desc = BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, 25)
    assert TritonBuilder().build(common, desc)._rows.parts is not None
