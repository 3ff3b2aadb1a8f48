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
    ("lengths", "heads", "dim", "page", "block_m", "block_n", "options"),
    [
        ([(17, 17), (40, 90), (1, 30)], (6, 2), 32, 16, 32, 16, {}),
        ([(17, 33), (40, 90)], (6, 2), 24, 16, 32, 32, {"softcap": 5.0}),
        ([(17, 33), (40, 90)], (4, 4), 32, 16, 16, 16, {"sliding_window": 20, "sinks": 4}),
        ([(17, 33), (40, 90)], (4, 2), 32, 32, 16, 16, {}),  # tiles smaller than a page
        ([(64, 64), (32, 64)], (2, 1), 32, 16, 32, 16, {}),  # lengths at the edges of tiles
    ],
)
def test_it_equals_the_reference(
    lengths: list[tuple[int, int]],
    heads: tuple[int, int],
    dim: int,
    page: int,
    block_m: int,
    block_n: int,
    options: dict[str, float],
) -> None:
    """Pages are shuffled, unused memory is NaN, and padded token rows become zeros."""
    from slipstream.kernels.attention.triton.prefill import Tiles, prefill_attention

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
    prefill_attention(query, cache, rows, rule, out, Tiles(block_m, block_n, 4, 2))
    expected = paged_attention_reference(query, cache.nan_to_num(), rows, rule)
    torch.testing.assert_close(out, expected, rtol=3e-6, atol=3e-6)
