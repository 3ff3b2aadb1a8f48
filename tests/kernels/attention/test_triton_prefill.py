"""Triton's attention of long queries, interpreted, equals the reference with every option."""

from __future__ import annotations

import pytest
import torch

from slipstream.kernels.attention.paged_attention import paged_attention_reference
from slipstream.kernels.attention.paged_rows import AttentionRule, PagedRows

pytestmark = [
    pytest.mark.usefixtures("triton_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, about inf and nan
]


@pytest.mark.parametrize(
    ("lengths", "heads", "dim", "page", "block_m", "block_n", "splits", "options"),
    [
        ([(9, 9), (20, 40), (1, 15)], (4, 2), 16, 16, 16, 16, 2, {}),
        ([(9, 17), (20, 45)], (3, 1), 24, 16, 16, 32, 1, {"softcap": 5.0}),
        ([(9, 17), (18, 45)], (2, 2), 16, 16, 16, 16, 2, {"sliding_window": 24, "sinks": 2}),
        ([(9, 17), (18, 45)], (2, 1), 16, 32, 16, 16, 1, {}),  # tiles smaller than a page
        ([(32, 32), (16, 32)], (2, 1), 16, 16, 32, 16, 2, {"sinks": 2}),  # edges of tiles
    ],
)
def test_it_equals_the_reference(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    dim: int,
    page: int,
    block_m: int,
    block_n: int,
    splits: int,
    options: dict[str, float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Pages are shuffled, unused memory is NaN, and padded token rows become zeros."""
    from slipstream.kernels.attention.triton import prefill

    monkeypatch.setattr(prefill, "_LEAST_KEYS", 16)  # the longest request has several splits
    new, total = zip(*lengths, strict=True)
    blocks = [-(-n // page) for n in total]
    table = torch.zeros(len(lengths), max(blocks) + 2, dtype=torch.int32)
    cache = torch.full((2, sum(blocks) + 1, page, heads[1], dim), float("nan"))
    free = (torch.randperm(sum(blocks)) + 1).tolist()
    for row, length in enumerate(total):
        for block in range(blocks[row]):
            table[row, block] = number = free.pop()
            used = min(page, length - block * page)
            cache[:, number, :used] = torch.randn(2, used, heads[1], dim)
    starts = torch.tensor([0, *new]).cumsum(0).int()
    tokens = int(starts[-1]) + 3
    rows = PagedRows(table, starts, torch.tensor(total).int(), max(new), torch.zeros(tokens).long())
    sinks = torch.randn(heads[0]) if options.pop("sinks", 0) else None
    rule = AttentionRule(scale=dim**-0.5, sinks=sinks, **options)  # type: ignore[arg-type]
    query = torch.randn(tokens, heads[0] + 1, dim)[:, 1:]
    out = torch.full((tokens, heads[0], dim), float("nan"))
    tiles = prefill.Tiles(block_m, block_n, 4, 2)
    prefill.prefill_attention(query, cache, rows, rule, out, tiles, splits)
    expected = paged_attention_reference(query, cache.nan_to_num(), rows, rule)
    torch.testing.assert_close(out, expected, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("splits", [1, 2])
def test_it_skips_short_requests_and_needs_few_programs(
    splits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of requests that it skips stay as they are, and a program may have several blocks."""
    from slipstream.kernels.attention.triton import prefill

    monkeypatch.setattr(prefill, "_LEAST_KEYS", 16)
    monkeypatch.setattr(prefill, "_MORE_BLOCKS", 0)
    lens = torch.tensor([2, 9, 1, 5, 3, 0])  # blocks of 8 tokens: 2, 1 and 1 for 23 rows
    total = torch.tensor([40, 50, 7, 5, 30, 0]).int()
    table = torch.arange(1, 25).int().view(6, 4)
    starts = torch.cat((torch.zeros(1), lens.cumsum(0))).int()
    rows = PagedRows(table, starts, total, 9, torch.zeros(23).long(), longer_than=2)
    query, cache = torch.randn(23, 2, 16), torch.randn(2, 25, 16, 1, 16)
    out = torch.full((23, 2, 16), 7.0)
    rule = AttentionRule(scale=0.25)
    tiles = prefill.Tiles(16, 16, 4, 2)
    prefill.prefill_attention(query, cache, rows, rule, out, tiles, splits)
    expected = paged_attention_reference(query, cache, rows, rule)
    is_long = (lens > 2).repeat_interleave(lens)
    torch.testing.assert_close(out[:20][is_long], expected[:20][is_long], rtol=3e-6, atol=3e-6)
    assert (out[:20][~is_long] == 7).all() and not out[20:].any()


def test_few_programs_share_long_keys() -> None:
    """A power of two of splits that keeps the GPU busy."""
    from slipstream.kernels.attention.triton.attention_plan import prefill_splits

    assert prefill_splits(programs=32, most=128, processors=132) == 8
    assert prefill_splits(programs=66, most=128, processors=132) == 4
    assert prefill_splits(programs=32, most=4, processors=132) == 4
    assert prefill_splits(programs=32, most=1, processors=132) == 1
    assert prefill_splits(programs=200, most=128, processors=132) == 1
