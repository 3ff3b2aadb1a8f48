"""Builds the arguments of the attention kernels from the flat dictionaries of tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from slipstream.kernels.attention.paged_rows import AttentionRule, PagedRows
from slipstream.kernels.linear.rotation import Rotation

NO_SLOTS = torch.empty(0, dtype=torch.int64)


def paged_inputs(
    query: Tensor, kv_cache: Tensor, **args: Any
) -> tuple[Tensor, Tensor, PagedRows, AttentionRule]:
    """The arguments of `paged_attention`, from fields of `PagedRows` and `AttentionRule`."""
    names = ("block_table", "query_start_loc", "seq_lens", "max_query_len")
    slots, arrivals = args.pop("slot_mapping", NO_SLOTS), args.pop("arrivals", None)
    rows = PagedRows(*(args.pop(name) for name in names), slots, arrivals)
    return query, kv_cache, rows, AttentionRule(**args)


def rotary_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    kv_cache: Tensor,
    interleaved: bool = False,
    norms: Any = None,
    whole: bool = False,
    **args: Any,
) -> tuple[Tensor, Tensor, Tensor, Rotation, Tensor, PagedRows, AttentionRule]:
    """The arguments of `rotary_attention`; further keywords as for `paged_inputs`."""
    rotation = Rotation(positions, cos_sin_cache, interleaved, norms, whole)
    return query, key, value, rotation, *paged_inputs(query, kv_cache, **args)[1:]
