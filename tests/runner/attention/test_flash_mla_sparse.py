"""FlashMLA's sparse kernel as a back end, with the package's documented meaning in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.attention.compressed.pages import Pages, SlotList
from slipstream.kernels.attention.compressed.sparse_attention import sparse_attention_reference
from slipstream.runner.attention.base import (
    AttentionLayer,
    BuilderSizes,
)
from slipstream.runner.attention.choice import UnusableBackend, choose_backend
from slipstream.runner.attention.compressed import CompressedBuilder
from slipstream.runner.attention.flash_mla import FlashMLABackend
from slipstream.runner.attention.flash_mla_sparse import SparsePass, joined_rows
from slipstream.runner.attention.reference import ReferenceBackend

from ..model_harness import Sequences, assert_equals_transformers, load
from ..tiny_v4 import make_v4


def sparse_forward(
    q: Tensor, kv: Tensor, indices: Tensor, sm_scale: float, d_v: int, *,
    attn_sink: Tensor, topk_length: Tensor | None, use_legacy: bool, return_log2_lse: bool,
) -> tuple[Tensor, None, None]:  # fmt: skip
    """q [M, H, D], kv [S, 1, D], indices [M, 1, K], of which those below 0 or beyond S count as
    none: the softmax over the rows, times exp(lse) / (exp(lse) + exp(sink))."""
    assert use_legacy and not return_log2_lse and indices.shape[2] % 128 == 0
    valid = (indices >= 0) & (indices < kv.shape[0])  # [M, 1, K]
    if topk_length is not None:
        assert topk_length.dtype is torch.int32
        valid &= torch.arange(indices.shape[2]) < topk_length[:, None, None]
    rows = kv[:, 0][indices[:, 0].clamp(0, kv.shape[0] - 1).long()]
    scores = torch.einsum("mhd,mkd->mhk", q, rows) * sm_scale
    scores = scores.masked_fill(~valid, float("-inf"))
    lse = scores.logsumexp(-1)
    out = torch.einsum("mhk,mkd->mhd", scores.softmax(-1), rows[..., :d_v])
    return out * torch.sigmoid(lse - attn_sink)[..., None], None, None


class SparseBackend(ReferenceBackend):
    def create_builder(
        self, layers: Sequence[AttentionLayer], sizes: BuilderSizes
    ) -> CompressedBuilder:
        return CompressedBuilder(sizes.block_size, lambda: SparsePass(sparse_forward))


def test_logits_equal_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    oracle, model = make_v4(tmp_path), load(tmp_path)
    make = Sequences.__init__

    def with_backend(self: Sequences, *args: Any, **options: Any) -> None:
        make(self, *args, **{**options, "backend": SparseBackend()})

    monkeypatch.setattr(Sequences, "__init__", with_backend)
    assert_equals_transformers(model, oracle, block_size=8)


def test_entries_lie_right_behind_the_raw_rows(tmp_path: Path) -> None:
    make_v4(tmp_path)
    model: Any = load(tmp_path)
    cache = Sequences(model, 2, 32, block_size=8).cache
    for block in model.blocks[1:]:
        layers = block.attn.layers
        raw, entries = (
            Pages(cache.kv_caches[layers[name].layer_id], *[torch.zeros(1)] * 2, 8)
            for name in ("raw", "entries")
        )
        entries.cache.fill_(2.0)
        rows = joined_rows(raw, entries)
        count = raw.rows.shape[0]
        assert rows.shape[0] == count + entries.rows.shape[0]
        assert bool((rows[count:] == 2).all()) and not rows[:count].any()
    total = sum(tensor.nbytes for tensor in cache.kv_caches.values())
    assert total == cache.num_bytes


def test_lists_are_joined_once_for_layers_that_share_them() -> None:
    seen: list[Tensor] = []

    def forward(q: Tensor, kv: Tensor, indices: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
        seen.append(indices)
        return (q,)

    attend = SparsePass(forward)
    both = torch.zeros(7 * 4)
    raw, entries = (Pages(t.view(-1, 1, 1, 4), *[both] * 2, 1) for t in both.split([16, 12]))
    slots = torch.tensor([[0, 1, -1]], dtype=torch.int32)
    window, chosen = SlotList(slots, slots[0]), SlotList(slots, slots[0])
    for lists in ((window, chosen), (window, chosen), (window, None)):
        attend(
            both.view(7, 1, 4),
            raw,
            lists[0],
            None if lists[1] is None else entries,
            lists[1],
            both,
            1.0,
        )
    assert seen[0] is seen[1] and seen[0].shape == seen[2].shape == (1, 1, 128)
    assert seen[0][0, 0, :7].tolist() == [0, 1, -1, 4, 5, -1, -1]
    assert seen[2][0, 0, :4].tolist() == [0, 1, -1, -1]


def test_what_the_kernel_cannot_read_is_named(tmp_path: Path) -> None:
    make_v4(tmp_path)
    layers = load(tmp_path).attention_layers()
    with pytest.raises(UnusableBackend, match="rows of 512 or 576, not of 32"):
        choose_backend("flash_mla", layers, torch.device("cpu"))
    assert FlashMLABackend.block_size(16) == 64


def test_listed_latent_rows_equal_the_reference() -> None:
    """DeepSeek V3.2's form: a value is a part of the row, no sinks, heads that are padded."""

    def forward(*args: Any, attn_sink: None, **options: Any) -> tuple[Tensor, None, None]:
        assert args[0].shape[1] == 64 and attn_sink is None
        none = torch.full((64,), float("-inf"))
        return sparse_forward(*args, attn_sink=none, **options)

    cache = torch.randn(5, 16, 1, 576)
    rows = Pages(cache, torch.zeros(1, 5).int(), torch.zeros(7).long(), 16)
    counts = torch.randint(1, 41, (7,)).int()
    slots = torch.rand(7, 80).argsort(1)[:, :40].int()
    chosen = SlotList(torch.where(torch.arange(40) < counts[:, None], slots, -1), counts)
    args = (torch.randn(7, 16, 576), rows, chosen, None, None, None, 0.05, 512)
    attend = SparsePass(forward)
    torch.testing.assert_close(attend(*args), sparse_attention_reference(*args))
