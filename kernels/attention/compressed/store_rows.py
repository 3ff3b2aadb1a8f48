"""Writes the rows of a pass into a cache of sparse attention, packed where the cache is."""

from __future__ import annotations

import torch
from torch import Tensor

from ...device import use_triton
from ..store_kv import store_kv
from .pages import Pages


def store_rows(rows: Tensor, pages: Pages, positions: Tensor | None = None) -> None:
    """Write row t of `rows` [M, 1, D] into the cache at slot `pages.slot_mapping[t]`, unless it is
    -1.

    In V4 one entry of the cache stands for several tokens. With `positions` [M], a row is written
    only if its token is the last of such an entry.
    """
    if pages.fp8 is None or not pages.fp8.paged:
        assert positions is None
        store_kv(rows, None, pages.cache, pages.slot_mapping, pages.fp8)
        return
    if use_triton(pages.cache):
        from .triton.store_rows import store_rows as store_rows_triton

        store_rows_triton(rows, pages, positions)
        return
    store_rows_reference(rows, pages, positions)


def store_rows_reference(rows: Tensor, pages: Pages, positions: Tensor | None = None) -> None:
    """The plain version of `store_rows` for packed pages."""
    written = pages.slot_mapping >= 0
    if positions is not None:
        written = written & ((positions + 1) % pages.entry_tokens == 0)
    at = written.nonzero().squeeze(1)
    pages.write(pages.slot_mapping[at] // pages.entry_tokens, rows[at, 0].to(torch.float32))
