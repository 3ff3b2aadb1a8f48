"""Kernels reach pages whose offset in the cache exceeds 31 bits.

The caches have more than 2 ** 31 elements. Memory that nothing touches costs nothing.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.kernels.attention.paged_attention import paged_attention_reference
from slipstream.kernels.attention.paged_rows import AttentionRule, PagedRows
from slipstream.kernels.attention.rotary_store_kv import rotary_store_kv_reference
from slipstream.kernels.linear.rotation import Rotation

pytestmark = [
    pytest.mark.usefixtures("triton_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, about inf and nan
]
PAGE, HEADS, DIM = 16, 2, 32
BLOCKS = 2**31 // (PAGE * HEADS * DIM) + 9
TABLE = [BLOCKS - 1, BLOCKS - 7, 3, BLOCKS - 3]
LENGTH = 60


@pytest.fixture
def cache() -> Tensor:
    """[2, BLOCKS, PAGE, HEADS, DIM], of which the pages of TABLE are filled."""
    cache = torch.empty(2, BLOCKS, PAGE, HEADS, DIM, dtype=torch.float16)
    for block in TABLE:
        cache[:, block] = torch.randn(2, PAGE, HEADS, DIM)
    return cache


def rows_of(tokens: int) -> PagedRows:
    at = torch.arange(LENGTH - tokens, LENGTH)
    table = torch.tensor([TABLE])
    slots = table[0, at // PAGE] * PAGE + at % PAGE
    lens = torch.tensor([LENGTH]).int()
    starts = torch.tensor([0, tokens]).int()
    return PagedRows(table.int(), starts, lens, tokens, slots, torch.zeros(HEADS).int())


@pytest.mark.parametrize("kernel", ["general", "prefill", "fixed"])
def test_attention_reads_them(kernel: str, cache: Tensor) -> None:
    from slipstream.kernels.attention.triton.fixed_splits import fixed_attention
    from slipstream.kernels.attention.triton.paged_attention import paged_attention
    from slipstream.kernels.attention.triton.prefill import prefill_attention

    rows, rule = rows_of(20), AttentionRule(scale=0.2)
    query = torch.randn(20, 2 * HEADS, DIM).half()
    out = torch.empty_like(query)
    if kernel == "general":
        paged_attention(query, cache, rows, rule, splits=2, out=out)
    elif kernel == "prefill":
        prefill_attention(query, cache, rows, rule, out)
    else:
        fixed_attention(query, cache, rows, rule, out)
    expected = paged_attention_reference(query.float(), cache, rows, rule)
    torch.testing.assert_close(out.float(), expected, rtol=3e-3, atol=3e-3)


def step_inputs(tokens: int) -> tuple[tuple[Tensor, Tensor, Tensor], Rotation]:
    qkv = torch.randn(tokens, 4 * HEADS, DIM).half()
    query, key, value = qkv.split([2 * HEADS, HEADS, HEADS], dim=1)
    return (query, key, value), Rotation(
        torch.arange(LENGTH - tokens, LENGTH), torch.randn(LENGTH, DIM)
    )


def test_one_kernel_writes_and_reads_them(cache: Tensor) -> None:
    from slipstream.kernels.attention.triton.attention_plan import plan_for
    from slipstream.kernels.attention.triton.rotary_attention import rotary_attention

    rows, rule = rows_of(3), AttentionRule(scale=0.2)
    qkv, rotation = step_inputs(3)
    plan = plan_for(qkv[0], cache, rows, rule)
    assert plan.fused
    got = rotary_attention(*qkv, rotation, cache, rows, rule, plan)
    stored = cache[:, TABLE].clone()
    query = rotary_store_kv_reference(*qkv, rotation, cache, rows.slot_mapping)
    torch.testing.assert_close(stored, cache[:, TABLE], rtol=2e-3, atol=2e-3)
    expected = paged_attention_reference(query.float(), cache, rows, rule)
    torch.testing.assert_close(got.float(), expected, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("rotates", [False, True])
def test_new_keys_reach_them(rotates: bool, cache: Tensor) -> None:
    from slipstream.kernels.attention.store_kv import store_kv_reference
    from slipstream.kernels.attention.triton.store_kv import store_kv
    from slipstream.kernels.linear.triton.norm_rope import rotary_store_kv

    rows = rows_of(20)
    (query, key, value), rotation = step_inputs(20)
    if rotates:
        rotary_store_kv(query, key, value, rotation, cache, rows.slot_mapping)
    else:
        store_kv(key, value, cache, rows.slot_mapping)
    stored = cache[:, TABLE].clone()
    if rotates:
        rotary_store_kv_reference(query, key, value, rotation, cache, rows.slot_mapping)
    else:
        store_kv_reference(key, value, cache, rows.slot_mapping)
    torch.testing.assert_close(stored, cache[:, TABLE], rtol=2e-3, atol=2e-3)
