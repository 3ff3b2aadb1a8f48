"""Attention by fixed splits, interpreted: it equals the reference, and a row's bits depend on its
own query and keys only."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.attention.paged_attention import paged_attention_reference
from slipstream.kernels.attention.paged_rows import AttentionRule, Fp8Cache, PagedRows

from ...cases import some
from .. import ordered_dot
from ..attention_inputs import paged_inputs
from .test_triton_attention import case

pytestmark = [
    pytest.mark.usefixtures("triton_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, about inf and nan
]
SPLIT = 32  # keys; the least of servers is larger, which would take the interpreter long
OPTIONS: list[dict[str, Any]] = [
    {},
    {"sliding_window": 20},
    {"softcap": 2.0, "sliding_window": 40},
    {"sinks": [0.3, -1.0, 2.0]},
]
ALL = [(options, alone) for options in OPTIONS for alone in (False, True)]


@pytest.fixture(autouse=True)
def short_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        from slipstream.kernels.attention.triton import fixed_splits

        monkeypatch.setattr(fixed_splits, "_LEAST_SPLIT", SPLIT)


def tensors(options: dict[str, Any]) -> dict[str, Any]:
    """The options with their lists as tensors."""
    return {k: torch.tensor(v) if isinstance(v, list) else v for k, v in options.items()}


def attend(
    query: Tensor, cache: Tensor, rows: PagedRows, rule: AttentionRule, alone: bool | None = None
) -> Tensor:
    from slipstream.kernels.attention.triton.fixed_splits import fixed_attention

    shape = (*query.shape[:2], rule.head_dim_v or query.shape[-1])
    out = torch.full(shape, float("nan"), dtype=query.dtype)
    fixed_attention(query, cache, rows, rule, out, alone)
    return out


@pytest.mark.parametrize(("options", "alone"), some(ALL, kept=[ALL[0], ALL[5], ALL[6]]))
def test_the_reference_agrees(options: dict[str, Any], alone: bool) -> None:
    args = case([1, 4, 30, 0], [90, 10, 70, 0], (3, 1), 16, padded_rows=3) | tensors(options)
    clean = dict(args, kv_cache=args["kv_cache"].nan_to_num())
    expected = paged_attention_reference(*paged_inputs(**clean))
    got = attend(*paged_inputs(**args), alone)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    assert not got[35:].any()  # rows of no request


@pytest.mark.parametrize("alone", [False, True])
def test_mla_agrees_with_the_reference(alone: bool) -> None:
    args = case([1, 3], [70, 40], (6, 1), 48, mla=True) | {"head_dim_v": 32}
    clean = dict(args, kv_cache=args["kv_cache"].nan_to_num())
    expected = paged_attention_reference(*paged_inputs(**clean))
    got = attend(*paged_inputs(**args), alone)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_an_fp8_cache_agrees_with_the_reference() -> None:
    args = case([1, 5], [70, 40], (2, 1), 16)
    cache = (args["kv_cache"].nan_to_num() / 0.5).to(torch.float8_e4m3fn)
    fp8 = Fp8Cache(torch.float32, 0.5, 0.25)
    inputs = paged_inputs(**dict(args, kv_cache=cache), fp8=fp8)
    torch.testing.assert_close(
        attend(*inputs, False), paged_attention_reference(*inputs), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize(
    ("options", "mla"),
    some(
        [*((options, False) for options in OPTIONS), ({}, True)], [({}, True), (OPTIONS[1], False)]
    ),
)
def test_a_row_has_the_same_bits_in_any_company(
    options: dict[str, Any], mla: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordered_dot.install(monkeypatch)
    rng = random.Random(f"{options} {mla}")
    length, dim = 70, 48 if mla else 16
    extra = {"head_dim_v": 32} if mla else {}
    args = case([length, 10], [length, 80], (3, 1), dim, mla=mla)
    args |= tensors(options) | extra
    query, cache, rows, rule = paged_inputs(**args)
    whole = attend(query[:length], cache, _part(rows, [0], [length], [length]), rule, True)
    at = 60  # across the border of two splits
    while at < length:
        count = min(rng.choice([1, 1, 2, 5]), length - at)
        own = query[at : at + count]
        if rng.random() < 0.5:
            part, company, first = _part(rows, [0], [count], [at + count]), own, 0
        else:
            part = _part(rows, [1, 0], [10, count], [80, at + count])
            company, first = torch.cat((query[length:], own)), 10
        for alone in (False, True):
            got = attend(company, cache, part, rule, alone)
            assert torch.equal(got[first:], whole[at : at + count]), f"rows from {at} on"
        at += count


def _part(rows: PagedRows, requests: list[int], counts: list[int], lens: list[int]) -> PagedRows:
    """Other query lengths and sequence lengths of some of the requests."""
    starts = torch.tensor([0, *counts]).cumsum(0).int()
    return replace(
        rows,
        block_table=rows.block_table[requests],
        query_start_loc=starts,
        seq_lens=torch.tensor(lens, dtype=torch.int32),
        max_query_len=max(counts),
    )
