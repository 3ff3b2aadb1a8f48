"""FlashMLA's split-KV kernel for listed rows of an fp8 cache (DeepSeek V3.2 and V4).

The kernel divides the rows of all tokens among the GPU's multiprocessors by a plan, which its first
call with a new schedule computes on the device. V4's plan depends on the lengths of the lists. Each
pass makes new schedules, so that under capture the graph contains the planning (vllm#42444): a
schedule that an earlier pass used would replay that pass's plan.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...kernels.attention.compressed.pages import Pages, SlotList
from ...kernels.quant.latent_pages import row_bytes, scale_bytes
from .flash_mla_sparse import DIM, padded_heads

_ROWS = 64  # the number of listed rows must be a multiple
_TOKENS = 512  # of a call: its partial results are float32, for each token and multiprocessor

# `flash_mla.get_mla_metadata()[0]` and `flash_mla.flash_mla_with_kvcache`
CreateSchedule = Callable[[], Any]
Decode = Callable[..., tuple[Tensor, Tensor]]
# The parts of a list, each with its counts.
_Parts = list[tuple[Tensor, Tensor]]


class ListedPass:
    """The attention of one pass: a token is a request of its own, with one query.

    Layers whose lists have the same lengths share the plans: those of one KV group do.
    """

    def __init__(self, create_schedule: CreateSchedule, decode: Decode) -> None:
        self._create_schedule, self._decode = create_schedule, decode
        self._schedules: dict[tuple[int, int, int], Any] = {}  # by heads, part and widths
        # The newest lists of both kinds; older ones are let go, because those of a long prefill are
        # large.
        self._parts: dict[str, tuple[SlotList, _Parts]] = {}

    def __call__(
        self,
        query: Tensor,
        raw: Pages,
        window: SlotList,
        entries: Pages | None,
        chosen: SlotList | None,
        sinks: Tensor | None,
        scale: float,
        dim_v: int | None = None,
    ) -> Tensor:
        heads = query.shape[1]
        query, sinks = padded_heads(query, sinks)
        assert raw.fp8 is not None
        is_v4 = raw.fp8.paged
        out: list[Tensor] = []
        for number, (slots, counts) in enumerate(self._parts_of("window", window)):
            own = query[number * _TOKENS : (number + 1) * _TOKENS]
            more: dict[str, Any] = {}
            if is_v4:  # V3.2's kernel knows the end of a list by its slots, which are -1
                more |= {"topk_length": counts, "attn_sink": sinks}
            if entries is not None and chosen is not None:
                extra, extra_counts = self._parts_of("chosen", chosen)[number]
                more |= {"extra_k_cache": blocks_of(entries), "extra_indices_in_kvcache": extra}
                more |= {"extra_topk_length": extra_counts}
            width = slots.shape[1] if chosen is None else slots.shape[1] + chosen.slots.shape[1]
            key = (query.shape[1], number, width)
            if key not in self._schedules:
                self._schedules[key] = self._create_schedule()
            found, _ = self._decode(
                own.unsqueeze(1), blocks_of(raw), None, None, DIM, self._schedules[key],
                softmax_scale=scale, is_fp8_kvcache=True, indices=slots,
                use_legacy=True, kv_format="V4" if is_v4 else "V32", **more,
            )  # fmt: skip
            out.append(found.squeeze(1))
        whole = out[0] if len(out) == 1 else torch.cat(out)
        return whole[:, :heads]

    def _parts_of(self, kind: str, listed: SlotList) -> _Parts:
        """The list as the kernel reads it: [m, 1, a multiple of 64] int32, and counts [m]."""
        if kind not in self._parts or self._parts[kind][0] is not listed:
            slots = listed.slots
            if slots.shape[1] % _ROWS:
                slots = pad(slots, (0, -slots.shape[1] % _ROWS), value=-1)
            parts = (slice(at, at + _TOKENS) for at in range(0, slots.shape[0], _TOKENS))
            pairs = [(slots[part].unsqueeze(1), listed.counts[part]) for part in parts]
            self._parts[kind] = (listed, pairs)
        return self._parts[kind][1]


def blocks_of(pages: Pages) -> Tensor:
    """The cache as the kernel reads it, [blocks, rows, 1, bytes a token]; V4's token counts its
    scales, which lie after the block's rows."""
    assert pages.fp8 is not None
    if not pages.fp8.paged:
        return pages.cache
    count, page = pages.cache.shape[0], pages.cache.shape[-1]
    each = row_bytes(pages.fp8.latent, pages.fp8.rotary) + scale_bytes(pages.fp8.latent)
    return pages.cache.as_strided((count, pages.page_rows, 1, each), (page, each, each, 1))
