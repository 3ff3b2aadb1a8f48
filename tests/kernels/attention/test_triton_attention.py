"""Triton's paged attention, interpreted, equals the reference with every option."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.attention.paged_attention import paged_attention_reference

from ...cases import some
from ..attention_inputs import paged_inputs

pytestmark = [
    pytest.mark.usefixtures("triton_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, about inf and nan
]


def case(
    query_lens: list[int],
    seq_lens: list[int],
    heads: tuple[int, int],
    dim: int,
    page: int = 16,
    padded_rows: int = 0,
    mla: bool = False,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Random arguments: pages are shuffled, unused memory is NaN, and padded rows have length 0."""
    num_blocks = sum(-(-n // page) for n in seq_lens) + 3
    max_blocks = max(-(-n // page) for n in seq_lens) + 2
    free = (torch.randperm(num_blocks - 1) + 1).tolist()
    table = torch.zeros(len(seq_lens), max_blocks, dtype=torch.int32)
    shape = (num_blocks, page, 1 if mla else heads[1], dim)
    cache = torch.full(shape if mla else (2, *shape), float("nan"))
    for row, length in enumerate(seq_lens):
        for block in range(-(-length // page)):
            table[row, block] = number = free.pop()
            used = min(page, length - block * page)
            target = cache[number] if mla else cache[:, number]
            target[..., :used, :, :] = torch.randn(target[..., :used, :, :].shape)
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    tokens = int(starts[-1]) + padded_rows
    return {
        "query": torch.randn(tokens, heads[0] + 1, dim).to(dtype)[:, 1:],
        "kv_cache": cache.to(dtype),
        "block_table": table,
        "query_start_loc": starts,
        "seq_lens": torch.tensor(seq_lens, dtype=torch.int32),
        "scale": dim**-0.5,
        "max_query_len": max(query_lens),
        "is_mla": mla,
    }


def check(args: dict[str, Any], tolerance: float = 3e-6, **options: Any) -> Tensor:
    from slipstream.kernels.attention.triton.paged_attention import paged_attention

    clean = dict(args, kv_cache=args["kv_cache"].nan_to_num())
    splits = options.pop("splits", None)
    expected = paged_attention_reference(*paged_inputs(**clean, **options))
    got = paged_attention(*paged_inputs(**args, **options), splits=splits)
    assert got.shape == expected.shape and got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
    return got


@pytest.mark.parametrize(
    ("heads", "query_len", "splits"),
    some(
        [
            *[((4, 4), 1, 1), ((6, 2), 1, 4), ((9, 3), 1, None), ((4, 4), 2, None)],
            *[((6, 2), 4, 1), ((6, 2), 4, 4), ((9, 3), 6, 1), ((9, 3), 6, None)],
        ],
        kept=[((6, 2), 1, 4), ((4, 4), 2, None), ((6, 2), 4, 4), ((9, 3), 6, 1)],
    ),
)
def test_uniform_lengths_with_padding(heads: tuple[int, int], query_len: int, splits: Any) -> None:
    args = case([query_len] * 3 + [0, 0], [query_len, 37, 130, 0, 0], heads, 16, padded_rows=5)
    got = check(args, splits=splits)
    assert not got[3 * query_len :].any()


@pytest.mark.parametrize(
    ("options", "splits"),
    some(
        itertools.product(({}, {"sliding_window": 20}, {"softcap": 5.0}), (1, 2)),
        kept=[({"sliding_window": 20}, 2), ({"softcap": 5.0}, 1)],
    ),
)
def test_prefill_chunks_and_decodes_in_one_batch(options: dict[str, Any], splits: int) -> None:
    args = case([70, 1, 9, 33, 0], [70, 50, 64, 90, 0], (2, 1), 16, padded_rows=3)
    check(args, splits=splits, **options)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("window", some((1, 5, 300), (5,)))
def test_sliding_window(window: int, splits: int) -> None:
    args = case([1, 3, 3], [200, 90, 3], (2, 1), 16)
    check(args, sliding_window=window, splits=splits)


@pytest.mark.parametrize("splits", [1, 4])
def test_sinks(splits: int) -> None:
    args = case([1, 4, 2], [100, 40, 2], (2, 1), 16)
    check(args, sinks=torch.randn(2) * 3, splits=splits)
    check(args, sinks=torch.randn(2) * 3, splits=splits, sliding_window=7)


@pytest.mark.parametrize("dim", some((64, 80, 192, 256, 512), (80, 512)))
def test_head_sizes(dim: int) -> None:
    check(case([1, 3], [40, 70], (4, 2), dim), splits=2)


@pytest.mark.parametrize(
    ("num_heads", "splits"),
    some(itertools.product((16, 80), (1, 4)), kept=[(16, 4), (80, 1)]),
)
def test_mla(num_heads: int, splits: int) -> None:
    args = case([1, 2, 0], [70, 130, 0], (num_heads, 1), 80, page=64, padded_rows=1, mla=True)
    check(args, head_dim_v=64, splits=splits)


def test_half_precision() -> None:
    # Triton 3.6 cannot interpret bf16 products; tests/gpu tests them.
    args = case([1, 5], [60, 40], (4, 2), 64, dtype=torch.float16)
    check(args, tolerance=2e-3, splits=2)


def test_launch_depends_on_shapes_only() -> None:
    from slipstream.kernels.attention.triton.paged_attention import plan_launch

    decode = plan_launch(1, 1, 8, 4, 128, 1, 4096, 132)
    assert (decode.block_m, decode.one_block, decode.splits) == (16, True, 16)
    many = plan_launch(256, 256, 8, 4, 128, 1, 4096, 132)
    assert many.splits == 1 or many.only_long
    verify = plan_launch(8, 32, 8, 4, 128, 4, 4096, 132)
    assert verify.one_block and verify.block_q == 4
    prefill = plan_launch(4, 2048, 8, 4, 128, 2048, 4096, 132)
    assert not prefill.one_block and prefill.splits == 1 and prefill.block_m == 128
