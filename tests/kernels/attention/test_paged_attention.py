"""The paged attention reference equals plain attention, computed request by request."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.attention.paged_attention import paged_attention, plan_attention
from slipstream.kernels.attention.store_kv import store_kv

from ..attention_inputs import paged_inputs

BLOCK, HQ, HKV, DIM = 4, 6, 2, 16
# (query length, sequence length) per request; (0, 0) is a padded row
BATCHES: dict[str, list[tuple[int, int]]] = {
    "decode_one": [(1, 13)],
    "decode_ragged": [(1, 13), (1, 1), (1, 30), (1, 8)],
    "decode_far_apart": [(1, 900), (1, 3), (1, 880), (1, 5)],
    "verify": [(5, 19), (5, 5), (5, 33)],
    "verify_trimmed_then_prefill": [(5, 19), (3, 11), (1, 7), (17, 17), (6, 20)],
    "prefill": [(21, 21)],
    "chunk": [(7, 40)],
    "padded": [(2, 9), (2, 12), (0, 0), (0, 0)],
    "nothing": [(0, 0)],
}


def make_step(
    batch: list[tuple[int, int]], dim: int, heads: int, is_mla: bool, in_order: bool = False
) -> tuple[dict[str, Any], list[tuple[Tensor, Tensor, Tensor]]]:
    """The arguments of `paged_attention` and, for each request, its query, keys and values."""
    torch.manual_seed(3)
    pages = max(1, max(-(-length // BLOCK) for _, length in batch))
    num_blocks = 1 + len(batch) * pages
    blocks = torch.arange(num_blocks - 1) if in_order else torch.randperm(num_blocks - 1)
    order = (1 + blocks).to(torch.int32).view(len(batch), pages)
    for row, (_, length) in enumerate(batch):
        order[row, -(-length // BLOCK) :] = 0  # unused entries point at the null block
    shape = (num_blocks, BLOCK, heads, dim)
    # NaN wherever nothing is stored
    cache = torch.full(shape if is_mla else (2, *shape), float("nan"))
    requests, queries = [], []
    for row, (count, length) in enumerate(batch):
        key, value = torch.randn(length, heads, dim), torch.randn(length, heads, dim)
        position = torch.arange(length)
        slots = order[row, position // BLOCK].long() * BLOCK + position % BLOCK
        store_kv(key, None if is_mla else value, cache, slots)
        queries.append(torch.randn(count, HQ, dim))
        requests.append((queries[-1], key, value))
    lengths = torch.tensor([0, *[count for count, _ in batch]])
    arguments = dict(
        query=torch.cat(queries),
        kv_cache=cache,
        block_table=order,
        query_start_loc=lengths.cumsum(0).int(),
        seq_lens=torch.tensor([length for _, length in batch]).int(),
        scale=0.3,
        max_query_len=int(lengths.max()),
    )
    return arguments, requests


def attend(arguments: dict[str, Any], **options: Any) -> Tensor:
    return paged_attention(*paged_inputs(**arguments, **options))


def written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Plain attention in float64, one query row and head at a time; [L, Hq, Dv]."""
    out = torch.zeros(*query.shape[:2], value.shape[-1], dtype=torch.float64)
    group = query.shape[1] // key.shape[1]
    for row in range(query.shape[0]):
        last = key.shape[0] - query.shape[0] + row
        first = 0 if window is None else max(0, last - window + 1)
        for head in range(query.shape[1]):
            keys = key[first : last + 1, head // group].double()
            scores = keys @ query[row, head].double() * 0.3
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            weights = scores.exp()
            total = weights.sum() + (0 if sinks is None else sinks[head].double().exp())
            out[row, head] = weights @ value[first : last + 1, head // group].double() / total
    return out


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("options", ["plain", "window", "softcap", "sinks", "all"])
def test_equals_attention_written_out(batch: str, options: str) -> None:
    arguments, requests = make_step(BATCHES[batch], DIM, HKV, is_mla=False)
    window = 6 if options in ("window", "all") else None
    softcap = 2.0 if options in ("softcap", "all") else None
    sinks = torch.randn(HQ) if options in ("sinks", "all") else None
    got = attend(arguments, sliding_window=window, softcap=softcap, sinks=sinks)
    parts = [written_out(*request, window, softcap, sinks) for request in requests]
    torch.testing.assert_close(got.double(), torch.cat(parts), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("grouped_from", [1, 10**6])
def test_neither_page_order_nor_grouping_changes_the_result(
    batch: str, window: int | None, grouped_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("slipstream.kernels.attention.paged_attention._GROUPED_KEYS", grouped_from)
    arguments, requests = make_step(BATCHES[batch], DIM, HKV, False, in_order=True)
    out = attend(arguments, sliding_window=window)
    expected = torch.cat([written_out(*request, window) for request in requests])
    torch.testing.assert_close(out.double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("batch", BATCHES)
def test_mla_reads_values_from_the_key_row(batch: str) -> None:
    arguments, requests = make_step(BATCHES[batch], 24, 1, is_mla=True)
    got = attend(arguments, is_mla=True, head_dim_v=10)
    parts = [written_out(query, key, key[..., :10]) for query, key, _ in requests]
    torch.testing.assert_close(got.double(), torch.cat(parts), atol=1e-4, rtol=1e-4)


def test_a_request_without_cached_tokens_gives_zeros() -> None:
    arguments, _ = make_step([(1, 5), (2, 6)], DIM, HKV, is_mla=False)
    arguments["seq_lens"] = torch.tensor([5, 0], dtype=torch.int32)
    got = attend(arguments)
    assert torch.equal(got[1:], torch.zeros(2, HQ, DIM)) and got[0].abs().sum() > 0


@pytest.mark.parametrize("is_mla", [False, True])
def test_slot_minus_one_writes_nothing(is_mla: bool) -> None:
    shape = (5, BLOCK, HKV, DIM)
    cache = torch.randn(shape if is_mla else (2, *shape))
    before = cache.clone()
    key, value = torch.randn(4, HKV, DIM), torch.randn(4, HKV, DIM)
    store_kv(key, None if is_mla else value, cache, torch.tensor([-1, 9, -1, 4]))
    flat = cache.flatten(0, 1) if is_mla else cache.flatten(1, 2)[0]
    assert torch.equal(flat[9], key[1]) and torch.equal(flat[4], key[3])
    if not is_mla:
        assert torch.equal(cache.flatten(1, 2)[1, [9, 4]], value[[1, 3]])
    changed = (cache != before).flatten(-2).any(-1)
    assert int(changed.sum()) == (2 if is_mla else 4)


def test_neighbouring_pages_are_read_in_place_and_equal_rows_in_one_call() -> None:
    table = torch.tensor([[3, 4, 5, 0], [9, 2, 7, 0], [8, 6, 1, 0]], dtype=torch.int32)
    single = plan_attention(table[:1], [0, 1], [11], BLOCK, None, torch.float32)
    assert single.runs[0].blocks is None and single.runs[0].mask is None
    batch = plan_attention(table, [0, 1, 2, 3], [11, 10, 12], BLOCK, None, torch.float32)
    assert len(batch.runs) == 1 and batch.runs[0].num_reqs == 3
    window = plan_attention(table[:1], [0, 1], [11], BLOCK, 3, torch.float32)
    assert window.runs[0].first_block == 5 and window.runs[0].num_keys == 3
