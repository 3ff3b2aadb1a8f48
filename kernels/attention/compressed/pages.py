"""Where the rows of DeepSeek's sparse attention are: paged by position, some of many tokens each.

A cache with `entry_tokens` r holds a row, an *entry*, for each window of r tokens. The query at
position p sees entry w iff w < (p + 1) // r. An entry is written by the token that completes its
window, so the entry of a rejected draft is overwritten before a later query sees it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...operation import operation
from ...quant.e4m3 import unpack_latent
from ...quant.latent_pages import pack_row, page_parts, unpack_row
from ..paged_rows import Fp8Cache


@dataclass(frozen=True)
class TokenRows:
    """The token rows of a pass."""

    positions: Tensor  # [M] int64; 0 for padding
    requests: Tensor  # [M] int64 token row -> batch row

    def part(self, rows: slice) -> TokenRows:
        """Some of the rows."""
        return TokenRows(self.positions[rows], self.requests[rows])


@dataclass(frozen=True)
class Pages:
    """One layer's cache of some kind, and the requests' places in it."""

    cache: Tensor  # [blocks, rows, 1, D]; [blocks, 1, 1, bytes] if its pages are packed
    block_table: Tensor  # [N, columns] int32
    slot_mapping: Tensor  # [M] int64, block * block_size + offset in tokens; -1 = write nothing
    block_size: int  # tokens of a block, a multiple of entry_tokens
    entry_tokens: int = 1
    fp8: Fp8Cache | None = None  # packed rows, or pages, of bytes

    @property
    def rows(self) -> Tensor:
        """The cache as rows, [slots, D]."""
        return self.cache.view(-1, self.cache.shape[-1])

    def gather(self, slots: Tensor) -> Tensor:
        """The rows in some slots, [..., D] float32; in slots below 0 any row."""
        slots = slots.clamp(min=0)
        if self.fp8 is None:
            return self.rows[slots].float()
        if self.fp8.paged:
            values, scales = self._parts()
            at = (slots // self.page_rows, slots % self.page_rows)
            rows = unpack_row(values[at], scales[at], self.fp8.latent, self.fp8.dtype)
            return rows.float()
        rows = self.rows.view(torch.uint8)[slots]
        return unpack_latent(rows, self.fp8.latent, self.fp8.dtype).float()

    def write(self, slots: Tensor, rows: Tensor) -> None:
        """Write rows [n, D] at slots [n]."""
        if self.fp8 is None:
            self.rows.index_copy_(0, slots, rows.to(self.cache.dtype))
            return
        assert self.fp8.paged
        page, place = slots // self.page_rows, slots % self.page_rows
        packed = pack_row(rows.to(self.fp8.dtype), self.fp8.latent)
        for part, new in zip(self._parts(), packed, strict=True):
            part[page, place] = new

    @property
    def page_rows(self) -> int:
        """Rows of a page."""
        return self.block_size // self.entry_tokens

    def _parts(self) -> tuple[Tensor, Tensor]:
        assert self.fp8 is not None
        return page_parts(self.cache, self.page_rows, self.fp8.latent, self.fp8.rotary)

    def slots_of(self, requests: Tensor, positions: Tensor) -> Tensor:
        """The slots of the rows that hold `positions` [M, S] of the requests [M]: [M, S] int64."""
        column = (positions // self.block_size).clamp(max=self.block_table.shape[1] - 1)
        blocks = self.block_table[requests.unsqueeze(1), column].long()
        return (blocks * self.block_size + positions % self.block_size) // self.entry_tokens


@dataclass(frozen=True)
class SlotList:
    """The cached rows that each token attends to."""

    slots: Tensor  # [M, S] int32; -1 after the first `counts` of a row
    counts: Tensor  # [M] int32


@dataclass(frozen=True)
class Compressor:
    """The constants of a compressor. Its rows lie in a cached row of pending values."""

    entry_tokens: int  # r
    dim: int  # D of an entry
    overlap: bool
    kv_column: int  # where a token's kv begins in the pending row: [D], or [2 D] with overlap
    gate_column: int  # where its gate begins, of the same size
    bias: Tensor  # [r, D or 2 D] float32
    weight: Tensor  # [D] float32, of the norm
    eps: float
    cos_sin_cache: Tensor  # [positions, rot_dim] float32

    @property
    def width(self) -> int:
        """Channels of a token's kv, and of its gate."""
        return 2 * self.dim if self.overlap else self.dim


def requests_of(query_start_loc: Tensor, num_tokens: int) -> Tensor:
    """The batch row of each token row, [M] int64; that of the last request for padding."""
    each = torch.arange(num_tokens, device=query_start_loc.device, dtype=torch.int32)
    ends = query_start_loc[1:].contiguous()
    return torch.searchsorted(ends, each, right=True).clamp(max=ends.shape[0] - 1)


def list_slots_reference(
    pages: Pages,
    tokens: TokenRows,
    width: int,
    newest: bool = False,
    chosen: Tensor | None = None,
) -> SlotList:
    """The slots of up to `width` entries that each token sees, oldest first.

    If it sees more, these are the oldest, or the `newest`; or those that are `chosen`, [M, width]
    int64, in their order.
    """
    seen = (tokens.positions + 1) // pages.entry_tokens
    counts = seen.clamp(max=width)
    each = torch.arange(width, device=seen.device)
    if chosen is None:
        first = (seen - width).clamp(min=0) if newest else torch.zeros_like(seen)
        chosen = first.unsqueeze(1) + each
    slots = pages.slots_of(tokens.requests, chosen * pages.entry_tokens)
    slots = torch.where(each < counts.unsqueeze(1), slots, -1)
    return SlotList(slots.int(), counts.int())


list_slots = operation(list_slots_reference, "tokens.positions", ".triton.list_slots")


def window_slots(pages: Pages, tokens: TokenRows, window: int) -> SlotList:
    """The newest `window` raw rows that each token sees, its own included, oldest first."""
    return list_slots(pages, tokens, window, True)


def entry_slots(pages: Pages, tokens: TokenRows, most: int) -> SlotList:
    """All entries that each token sees, oldest first. `most` is a bound on their number."""
    return list_slots(pages, tokens, most)
