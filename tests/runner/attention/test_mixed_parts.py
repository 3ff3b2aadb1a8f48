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
from slipstream.runner.attention.triton import TritonBuilder

PAGE, HEADS, KV_HEADS, DIM = 16, 4, 2, 16


def batch(
    query_lens: list[int], seq_lens: list[int], padded: int = 0, decode_len: int = 1
) -> CommonAttentionMetadata:
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
        max_decode_len=decode_len,
    )


@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, about inf and nan
@pytest.mark.parametrize(
    ("decode", "window", "splits"), [(1, None, None), (4, None, 2), (1, 10, 1)]
)
def test_two_launches_give_what_one_gives(
    decode: int, window: int | None, splits: int | None
) -> None:
    """Neither launch touches the rows of the other, even where a second kernel sums splits."""
    from slipstream.kernels.attention.triton.paged_attention import paged_attention

    seq_lens = [5 + 2 * i for i in range(9)] + [20, 30]
    common = batch([decode] * 9 + [6, 17], seq_lens, padded=2, decode_len=decode)
    layer = AttentionLayer(
        scale=DIM**-0.5, sliding_window=window, layer_id=0, num_heads=HEADS,
        num_kv_heads=KV_HEADS, head_dim=DIM,
    )  # fmt: skip
    rows = TritonBuilder().build(common)._rows
    assert rows.short_len == decode and rows.max_query_len == 17
    tokens = common.num_actual_tokens
    query = torch.randn(tokens, HEADS, DIM)
    cache = torch.randn(2, int(common.block_table.max()) + 1, PAGE, KV_HEADS, DIM)
    got = paged_attention(query, cache, rows, layer, splits=splits)
    expected = paged_attention_reference(query, cache, rows, layer)
    torch.testing.assert_close(got, expected, rtol=3e-6, atol=3e-6)
    assert not got[tokens - 2 :].any()


@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, about inf and nan
@pytest.mark.parametrize("desc", [None, BatchExecutionDescriptor(CUDAGraphMode.FULL, 26, 10)])
@pytest.mark.parametrize(  # of num_parts: partial sums of the projection
    ("num_parts", "has_units"), [(0, False), (2, False), (0, True)]
)
def test_each_kind_of_request_is_rotated_written_and_attended(
    num_parts: int,
    has_units: bool,
    desc: BatchExecutionDescriptor | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decodes by the fused kernel, the others by two kernels; both write into `out`."""
    if has_units:  # of which the long request, whose programs have no work, gets some
        from slipstream.kernels.attention.triton import attention_plan

        plan, units = attention_plan.plan_launch, {"extras": 2.0, "unit_bits": 4, "splits": 1}
        units |= {"last_sums": 2, "block_n": 16, "ahead": True}
        monkeypatch.setattr(
            attention_plan, "plan_launch", lambda *sizes: replace(plan(*sizes), **units)
        )
    common = batch([17] + [1] * 9, [90] + [5 + 9 * i for i in range(9)])
    tokens = common.num_actual_tokens
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
    metadata = TritonBuilder(arrivals).build(common, desc)
    assert metadata._rows.short_len == 1 and metadata._rows.arrivals is arrivals
    out = torch.full((tokens, HEADS, DIM), float("nan"))
    got = metadata.rotate_and_attend(layer, query, key, value, cache, rotary, out)
    assert got.data_ptr() == out.data_ptr()

    rotated = rotary_store_kv_reference(
        query, key, value, rotary, expected_cache, common.slot_mapping
    )
    expected = paged_attention_reference(rotated, expected_cache, metadata._rows, layer)
    torch.testing.assert_close(cache, expected_cache, rtol=3e-6, atol=3e-6)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    assert not arrivals.any()


@pytest.mark.parametrize(
    ("query_lens", "decode_len", "short_len", "longest"),
    [
        ([1] * 8 + [17], 1, 1, 17),
        ([4] * 10 + [1, 1, 100, 200], 4, 4, 200),  # verify rows, then decodes, then prefills
        ([300, *[1] * 8, 2], 4, 4, 300),  # a short prefill is like a decode
        ([1] * 8 + [300], 4, 1, 300),  # none of the decodes verifies
        ([1] * 7 + [300], 1, 0, 300),  # too few decodes
        ([1] * 2, 1, 0, 1),  # decodes alone have one launch
        ([3, 1], 4, 0, 4),
        ([20] * 9 + [300], 1, 0, 300),
        ([300], 1, 0, 300),
    ],
)
def test_a_batch_outside_graphs_has_the_launches_that_pay(
    query_lens: list[int], decode_len: int, short_len: int, longest: int
) -> None:
    arrivals = torch.zeros(1)
    common = batch(query_lens, [n + 3 for n in query_lens], decode_len=decode_len)
    rows = TritonBuilder(arrivals).build(common)._rows
    assert (rows.short_len, rows.max_query_len) == (short_len, longest)
    fuses = bool(short_len) or longest <= decode_len
    assert (rows.arrivals is arrivals) == fuses


def test_a_full_graph_of_any_batch_has_both_launches() -> None:
    """Its capture cannot know which requests will decode."""
    common = batch([1] * 8 + [17], [30] * 9, decode_len=4)
    builder = TritonBuilder(torch.zeros(1))
    rows = builder.build(common, BatchExecutionDescriptor(CUDAGraphMode.FULL, 32, 9))._rows
    assert (rows.short_len, rows.max_query_len) == (4, 32)
    small = builder.build(common, BatchExecutionDescriptor(CUDAGraphMode.FULL, 2, 2))._rows
    assert (small.short_len, small.max_query_len) == (0, 4) and small.arrivals is not None
    desc = BatchExecutionDescriptor(CUDAGraphMode.FULL, 18, 9, 2)
    uniform = builder.build(common, desc)._rows
    assert (uniform.short_len, uniform.max_query_len) == (0, 2) and uniform.arrivals is not None
