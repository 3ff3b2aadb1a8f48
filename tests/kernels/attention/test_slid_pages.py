"""No attention kernel lets pages that left a sliding window reach a result.

The block table still names such pages, which may hold another request's values by then. A value
that is not finite would turn a sum with a weight of 0 into NaN.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.attention.paged_attention import paged_attention_reference
from slipstream.kernels.attention.paged_rows import AttentionRule, PagedRows

from ...cases import some
from ..attention_inputs import paged_inputs
from ..gluon_threads import ThreadedKernel
from .test_triton_attention import case

pytestmark = [
    pytest.mark.usefixtures("triton_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, about inf and nan
]
WINDOW = 70


def slid_case(new: list[int], total: list[int], page: int) -> tuple[Any, Tensor]:
    """Arguments of an attention, whose pages before all windows are NaN, and its result."""
    query, cache, rows, rule = paged_inputs(
        **case(new, total, (2, 1), 64, page), sliding_window=WINDOW
    )
    for row, (length, tokens) in enumerate(zip(total, new, strict=True)):
        first = max(0, length - tokens - WINDOW + 1) // page
        cache[:, rows.block_table[row, :first].long()] = float("nan")
    return (query, cache, rows, rule), paged_attention_reference(
        query, cache.nan_to_num(), rows, rule
    )


def run(kernel: str, query: Tensor, cache: Tensor, rows: PagedRows, rule: AttentionRule) -> Tensor:
    from slipstream.kernels.attention.triton import fixed_splits, hopper_prefill, prefill
    from slipstream.kernels.attention.triton.paged_attention import paged_attention

    out = torch.full(query.shape, float("nan"))
    if kernel == "hopper":
        hopper_prefill.hopper_prefill(query, cache, rows, rule, out, programs=2)
    elif kernel == "prefill":
        tiles = prefill.Tiles(32, 32, 4, 2)
        prefill.prefill_attention(query, cache, rows, rule, out, tiles, splits=2)
    elif kernel == "reference":
        out.copy_(paged_attention_reference(query, cache, rows, rule))
    elif kernel == "general":
        paged_attention(query, cache, rows, rule, splits=2, out=out)
    else:
        fixed_splits.fixed_attention(query, cache, rows, rule, out, alone=kernel == "fixed, alone")
    return out


KERNELS = ("hopper", "prefill", "general", "fixed, alone", "fixed, merged", "reference")


@pytest.mark.parametrize(
    ("kernel", "page"),
    some(
        [(kernel, page) for kernel in KERNELS for page in (8, 32)],
        kept=[*((kernel, 8) for kernel in KERNELS), ("hopper", 32)],  # a tile has many pages, or 2
    ),
)
def test_pages_before_the_window_are_not_read(
    kernel: str, page: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from slipstream.kernels.attention.triton import fixed_splits, hopper_prefill

    if kernel == "hopper":
        ThreadedKernel(hopper_prefill, "_hopper_prefill_kernel").replace(monkeypatch)
    monkeypatch.setattr(fixed_splits, "_LEAST_SPLIT", 32)
    arguments, expected = slid_case([33, 1, 20], [250, 190, 103], page)
    got = run(kernel, *arguments)
    torch.testing.assert_close(got, expected, rtol=3e-6, atol=3e-6)
