"""The attention of long queries for Hopper GPUs equals the reference, also replayed in a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.attention.paged_attention import paged_attention_reference
from slipstream.kernels.attention.paged_rows import AttentionRule, PagedRows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="needs a Hopper GPU",
    ),
]


def make(lengths: list[tuple[int, int]], kv_heads: int, dim: int, page: int) -> tuple[Any, Tensor]:
    """Rows over shuffled pages whose unused memory is NaN, and the cache."""
    new, total = zip(*lengths, strict=True)
    blocks = [-(-n // page) for n in total]
    table = torch.zeros(len(lengths), max(blocks) + 2, dtype=torch.int32)
    cache = torch.full((2, sum(blocks) + 1, page, kv_heads, dim), float("nan")).bfloat16()
    free = (torch.randperm(sum(blocks)) + 1).tolist()
    for row, length in enumerate(total):
        for block in range(blocks[row]):
            table[row, block] = number = free.pop()
            used = min(page, length - block * page)
            cache[:, number, :used] = torch.randn(2, used, kv_heads, dim).bfloat16()
    starts, lens = torch.tensor([0, *new]).cumsum(0).int(), torch.tensor(total).int()
    slots = torch.zeros(int(starts[-1]) + 3).long().cuda()
    return PagedRows(table.cuda(), starts.cuda(), lens.cuda(), max(new), slots), cache.cuda()


def error(out: Tensor, query: Tensor, cache: Tensor, rows: PagedRows, rule: AttentionRule) -> float:
    wide = cache.float().nan_to_num()
    expected = paged_attention_reference(query.float(), wide, rows, rule)
    return float((out.float() - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("lengths", "heads", "dim", "page", "form", "options"),
    [
        ([(3000, 3000)], (32, 8), 128, 16, {}, {}),
        ([(700, 2900), (9, 9), (1300, 1300)], (32, 8), 128, 16, {"alternate": False}, {}),
        ([(700, 2900), (513, 600)], (32, 8), 128, 64, {"block_n": 64, "stages": 4}, {}),
        ([(900, 1700), (300, 300)], (9, 3), 64, 16, {}, {"softcap": 30.0}),
        ([(900, 1700), (300, 300)], (64, 8), 64, 32, {}, {"sliding_window": 128, "sinks": 64}),
        ([(700, 2900), (513, 600)], (8, 8), 128, 256, {"stages": 1}, {"sliding_window": 1000}),
    ],
)
def test_it_equals_the_reference(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    dim: int,
    page: int,
    form: dict[str, Any],
    options: dict[str, Any],
) -> None:
    from slipstream.kernels.attention.triton.hopper_prefill import Form, fits, hopper_prefill

    rows, cache = make(lengths, heads[1], dim, page)
    options = dict(options)
    sinks = torch.randn(options.pop("sinks", 0)).cuda()
    rule = AttentionRule(scale=dim**-0.5, sinks=sinks if len(sinks) else None, **options)
    for row, (new, total) in enumerate(lengths):  # pages before the window are another request's
        first = max(0, total - new - (rule.sliding_window or total) + 1) // page
        cache[:, rows.block_table[row, :first].long()] = float("nan")
    query = torch.randn(len(rows.slot_mapping), heads[0] + 1, dim).bfloat16().cuda()[:, 1:]
    assert fits(query, cache, rows, rule)
    out = torch.full((len(query), heads[0], dim), float("nan")).bfloat16().cuda()
    hopper_prefill(query, cache, rows, rule, out, Form(**form))
    assert error(out, query, cache, rows, rule) < 8e-3
    assert not out[-3:].any()


def test_a_graph_finds_its_requests_on_the_device() -> None:
    """One graph serves requests of other lengths, and leaves those that its launch skips."""
    from slipstream.kernels.attention.triton.hopper_prefill import hopper_prefill

    rule = AttentionRule(scale=128**-0.5)
    rows, cache = make([(1, 900), (2000, 2400), (1, 50), (46, 700)], 8, 128, 16)
    rows = PagedRows(
        rows.block_table, rows.query_start_loc, rows.seq_lens, 2048, rows.slot_mapping,
        longer_than=1,
    )  # fmt: skip
    query = torch.randn(2051, 32, 128).bfloat16().cuda()
    out = torch.zeros(2051, 32, 128).bfloat16().cuda()
    hopper_prefill(query, cache, rows, rule, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hopper_prefill(query, cache, rows, rule, out)
    for new in ([1, 2000, 1, 46], [700, 1, 30, 640], [1, 1, 1, 1]):
        rows.query_start_loc.copy_(torch.tensor([0, *new]).cumsum(0))
        out.fill_(7)
        graph.replay()
        expected = paged_attention_reference(query.float(), cache.float().nan_to_num(), rows, rule)
        start = 0
        for length in new:
            part = slice(start, start + length)
            if length == 1:
                assert (out[part] == 7).all()
            else:
                difference = (out[part].float() - expected[part]).norm()
                assert float(difference / expected[part].norm()) < 8e-3
            start += length
        assert not out[start:].any()
