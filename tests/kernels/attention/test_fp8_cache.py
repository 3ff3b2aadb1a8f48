"""Attention over an e4m3 cache, interpreted, equals the reference over the same cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.attention import rotary_attention
from slipstream.kernels.attention.paged_attention import paged_attention_reference
from slipstream.kernels.attention.paged_rows import Fp8Cache
from slipstream.kernels.attention.rotary_store_kv import (
    rotary_store_kv,
    rotary_store_kv_reference,
)
from slipstream.kernels.quant.e4m3 import E4M3, pack_latent, quantise, unpack_latent

from ...cases import some
from ..attention_inputs import paged_inputs, rotary_inputs
from . import test_triton_attention as general
from . import test_triton_rotary_attention as fused

pytestmark = [
    pytest.mark.usefixtures("triton_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, about inf and nan
]
FP8 = Fp8Cache(torch.float32, 0.03, 0.5)


def stored(cache: Tensor) -> Tensor:
    """A cache [2, ...] as e4m3 with the scales of `FP8`; NaN, of unused memory, stays NaN."""
    return torch.stack((quantise(cache[0], FP8.k_scale), quantise(cache[1], FP8.v_scale)))


def widened(cache: Tensor) -> Tensor:
    return torch.stack((cache[0].float() * FP8.k_scale, cache[1].float() * FP8.v_scale))


def without_nan(cache: Tensor) -> Tensor:
    codes = cache.view(torch.uint8)
    return codes.where((codes & 0x7F) != 0x7F, 0).view(E4M3)


@pytest.mark.parametrize(
    ("query_lens", "options", "splits"),
    some(
        [
            ([1, 1, 1, 0], {}, 1),
            ([1, 1, 1, 0], {}, 4),
            ([4, 4, 4, 0], {"sliding_window": 20}, 4),
            ([1, 9, 30, 0], {"softcap": 5.0}, 1),
            ([1, 9, 30, 0], {"sinks": torch.arange(4) - 2.0}, 2),
        ],
        kept=[([1, 1, 1, 0], {}, 4), ([1, 9, 30, 0], {"softcap": 5.0}, 1)],
    ),
)
def test_paged_attention(query_lens: list[int], options: dict[str, Any], splits: int) -> None:
    from slipstream.kernels.attention.triton.paged_attention import paged_attention

    args = general.case(query_lens, [40, 37, 70, 0], (4, 2), 16, padded_rows=2)
    plain = dict(args, kv_cache=widened(without_nan(stored(args["kv_cache"]))))
    args["kv_cache"] = stored(args["kv_cache"])
    clean = dict(args, kv_cache=without_nan(args["kv_cache"]))
    got = paged_attention(*paged_inputs(**args, fp8=FP8, **options), splits=splits)
    expected = paged_attention_reference(*paged_inputs(**clean, fp8=FP8, **options))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=3e-6, atol=3e-6)
    # and both equal attention over the values that the codes stand for
    expected = paged_attention_reference(*paged_inputs(**plain, **options))
    torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-5)


def test_a_mixed_batch_in_two_launches() -> None:
    from slipstream.kernels.attention.triton.paged_attention import paged_attention

    args = general.case([1, 1, 20], [40, 37, 70], (4, 2), 16)
    args["kv_cache"] = without_nan(stored(args["kv_cache"]))
    query, cache, rows, rule = paged_inputs(**args, fp8=FP8)
    got = paged_attention(query, cache, replace(rows, short_len=1), rule)
    expected = paged_attention_reference(query, cache, rows, rule)
    torch.testing.assert_close(got, expected, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("options", some(({}, {"sliding_window": 20}), ({},)))
def test_long_queries(options: dict[str, Any]) -> None:
    from slipstream.kernels.attention.triton.prefill import Tiles, prefill_attention

    args = general.case([17, 40, 1], [17, 70, 30], (4, 2), 32, padded_rows=2)
    args["kv_cache"] = stored(args["kv_cache"])
    query, cache, rows, rule = paged_inputs(**args, fp8=FP8, **options)
    out = torch.full((60, 4, 32), float("nan"))
    prefill_attention(query, cache, rows, rule, out, Tiles(32, 16, 4, 2))
    expected = paged_attention_reference(query, without_nan(cache), rows, rule)
    torch.testing.assert_close(out, expected, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize(
    ("latent", "rotary", "splits"),
    some([(64, 16, 1), (256, 32, 4), (160, 16, 2), (512, 64, 2)], [(64, 16, 1), (256, 32, 4)]),
)
def test_packed_rows_of_mla(latent: int, rotary: int, splits: int) -> None:
    from slipstream.kernels.attention.triton.paged_attention import paged_attention

    args = general.case(
        [1, 2, 0], [70, 30, 0], (6, 1), latent + rotary, page=64, padded_rows=1, mla=True
    )
    rows = args["kv_cache"].nan_to_num()
    packed = pack_latent(rows, latent)
    fp8 = replace(FP8, k_scale=1.0, v_scale=1.0, latent=latent)
    options = {"head_dim_v": latent}
    args["kv_cache"] = packed.view(E4M3)
    got = paged_attention(*paged_inputs(**args, fp8=fp8, **options), splits=splits)
    expected = paged_attention_reference(*paged_inputs(**args, fp8=fp8, **options))
    torch.testing.assert_close(got, expected, rtol=3e-6, atol=3e-6)
    args["kv_cache"] = unpack_latent(packed, latent, torch.float32)
    expected = paged_attention_reference(*paged_inputs(**args, **options))
    torch.testing.assert_close(got, expected, rtol=3e-6, atol=3e-6)


def assert_codes_close(got: Tensor, expected: Tensor) -> None:
    """Codes are equal, but for a few where a value lies beside the border between two."""
    codes, others = got.view(torch.uint8).int(), expected.view(torch.uint8).int()
    assert ((codes - others).abs() <= 1).all()
    assert (codes != others).float().mean() < 0.002


@pytest.mark.parametrize(
    ("query_len", "num_parts", "has_norms", "changes", "options"),
    some(
        [
            (1, 0, False, {"splits": 1}, {}),
            (4, 3, True, {"splits": 4, "block_n": 16}, {}),
            (2, 2, False, {"splits": 4, "block_n": 16, "last_sums": 0}, {"sliding_window": 9}),
            (2, 0, True, {"splits": 2, "heads_first": True}, {"softcap": 2.0}),
        ],
        kept=[(4, 3, True, {"splits": 4, "block_n": 16}, {}), (1, 0, False, {"splits": 1}, {})],
    ),
)
def test_rotary_store_and_attention_in_one_kernel(
    query_len: int,
    num_parts: int,
    has_norms: bool,
    changes: dict[str, Any],
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from slipstream.kernels.attention.triton import attention_plan

    args = fused.case(query_len, [query_len, 37, 21, 0], num_parts=num_parts)
    args["kv_cache"] = stored(args["kv_cache"])
    norms = (torch.rand(16), torch.rand(16), 1e-6) if has_norms else None
    inputs = rotary_inputs(**args, norms=norms, fp8=FP8, **options)
    *qkv, rotation, cache, rows, rule = inputs
    before = cache.clone()
    query = rotary_store_kv_reference(*qkv, rotation, before, rows.slot_mapping, FP8)
    plan = attention_plan.plan_launch
    monkeypatch.setattr(
        attention_plan, "plan_launch", lambda *sizes: replace(plan(*sizes), **changes)
    )
    monkeypatch.setenv("SLIPSTREAM_TRITON", "1")
    got = rotary_attention.rotary_attention(*inputs)
    assert_codes_close(cache, before)
    expected = paged_attention_reference(query, without_nan(cache), rows, rule)
    assert got.dtype == torch.float32 and not args["arrivals"].any()
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("num_parts", "has_norms", "dim"), [(0, False, 24), (3, True, 24), (0, False, 32)]
)
def test_rotary_embedding_and_store_of_a_prefill(
    num_parts: int, has_norms: bool, dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of 32 values are turned whole."""
    from slipstream.kernels.linear.triton import norm_rope

    monkeypatch.setattr(norm_rope, "HALVES", (4, 2))
    args = fused.case(2, [9, 30, 0], (4, 2), dim, 12 if dim == 24 else dim, num_parts)
    args["kv_cache"] = stored(args["kv_cache"])
    norms = (torch.rand(dim), torch.rand(dim), 1e-6) if has_norms else None
    *qkv, rotation, cache, rows, _ = rotary_inputs(**args, norms=norms, fp8=FP8)
    expected_cache = cache.clone()
    inputs = (*qkv, rotation)
    expected = rotary_store_kv_reference(*inputs, expected_cache, rows.slot_mapping, FP8)
    monkeypatch.setenv("SLIPSTREAM_TRITON", "1")
    got = rotary_store_kv(*inputs, cache, rows.slot_mapping, FP8)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    assert_codes_close(cache, expected_cache)
