"""FlashMLA's split-KV kernel for listed fp8 rows as a back end, with the package's documented
meaning, and its checks of shapes and strides, in plain torch."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.attention.compressed.pages import Pages, SlotList
from slipstream.kernels.attention.compressed.sparse_attention import sparse_attention_reference
from slipstream.kernels.attention.paged_rows import Fp8Cache
from slipstream.kernels.attention.store_kv import store_kv
from slipstream.kernels.quant.e4m3 import E4M3
from slipstream.kernels.quant.latent_pages import page_bytes
from slipstream.runner.attention import choice, flash_mla_listed
from slipstream.runner.attention.base import (
    AttentionCGSupport,
    AttentionLayer,
    BuilderSizes,
)
from slipstream.runner.attention.compressed import CompressedBuilder
from slipstream.runner.attention.flash_mla import FlashMLABackend
from slipstream.runner.attention.flash_mla_listed import ListedPass
from slipstream.runner.attention.fp8_layers import with_fp8_cache
from slipstream.runner.attention.reference import ReferenceBackend

from ..model_harness import Sequences, load
from ..tiny_v4 import make_v4


class Schedule:
    """What a call planned: the lengths of the lists, until the next pass."""

    lengths: list[Tensor] | None = None


def rows_of(cache: Tensor, v4: bool) -> Tensor:
    """The numbers of a cache [blocks, rows, 1, bytes], as the package documents its bytes."""
    blocks, rows, _, each = cache.shape
    data = cache.view(torch.uint8)
    out = torch.empty(blocks, rows, 512 if v4 else 576)
    assert each == (584 if v4 else 656) and data.stride(1) == each
    for block in range(blocks):
        page = data[block].as_strided((rows * each,), (1,))
        for row in range(rows):
            own = page[row * 576 : (row + 1) * 576] if v4 else page[row * 656 : (row + 1) * 656]
            if v4:
                codes, ends = own[:448], own[448:]
                exponents = page[rows * 576 + row * 8 :][:7].int() - 127
                scales = (2.0**exponents).repeat_interleave(64)
            else:
                codes, ends = own[:512], own[528:]
                scales = own[512:528].clone().view(torch.float32).repeat_interleave(128)
            values = (codes.clone().view(E4M3).float() * scales, ends.clone().view(torch.bfloat16))
            out[block, row] = torch.cat((values[0], values[1].float()))
    return out.flatten(0, 1)


def decode(
    q: Tensor, k_cache: Tensor, block_table: None, cache_seqlens: None, head_dim_v: int,
    schedule: Schedule, *, softmax_scale: float, is_fp8_kvcache: bool, indices: Tensor,
    use_legacy: bool, kv_format: str, attn_sink: Tensor | None = None,
    extra_k_cache: Tensor | None = None, extra_indices_in_kvcache: Tensor | None = None,
    topk_length: Tensor | None = None, extra_topk_length: Tensor | None = None,
) -> tuple[Tensor, None]:  # fmt: skip
    """q [b, 1, H, D], indices [b, 1, K]: the softmax over the first rows of each list."""
    assert is_fp8_kvcache and use_legacy and head_dim_v == 512
    batch, queries, heads, dim = q.shape
    v4 = kv_format == "V4"
    assert queries == 1 and heads in (64, 128) and dim == (512 if v4 else 576)
    assert v4 or (topk_length is None and extra_k_cache is None)  # as the SM90 kernel asserts
    lists = [(k_cache, indices, topk_length)]
    if extra_k_cache is not None:
        assert extra_indices_in_kvcache is not None
        lists.append((extra_k_cache, extra_indices_in_kvcache, extra_topk_length))
    lengths = [counts for _, _, counts in lists if counts is not None]
    if schedule.lengths is None:
        schedule.lengths = [counts.clone() for counts in lengths]
    assert all(map(torch.equal, schedule.lengths, lengths)), "a stale plan"
    keys, valid = [], []
    for cache, slots, counts in lists:
        assert slots.shape[:2] == (batch, 1) and slots.shape[2] % 64 == 0
        assert slots.dtype is torch.int32 and (counts is None or counts.shape == (batch,))
        every = rows_of(cache, v4)
        shown = slots[:, 0] >= 0
        if counts is not None:
            shown &= torch.arange(slots.shape[2]) < counts[:, None]
        keys.append(every[slots[:, 0].clamp(min=0).long()])
        valid.append(shown)
    key, shown = torch.cat(keys, 1), torch.cat(valid, 1)
    scores = torch.einsum("bhd,bkd->bhk", q[:, 0].float(), key) * softmax_scale
    scores = scores.masked_fill(~shown[:, None], float("-inf"))
    out = torch.einsum("bhk,bkd->bhd", scores.softmax(-1), key[..., :512])
    if attn_sink is not None:
        assert attn_sink.shape == (heads,) and attn_sink.dtype is torch.float32
        out = out * torch.sigmoid(scores.logsumexp(-1) - attn_sink)[..., None]
    return out.to(q.dtype)[:, None], None


def some_pages(fp8: Fp8Cache, dim: int, blocks: int, rows: int) -> Pages:
    """Packed pages of random rows."""
    count = page_bytes(rows, fp8.latent, fp8.rotary)
    shape = (blocks, 1, 1, count) if fp8.paged else (blocks, rows, 1, 656)
    slots = torch.arange(blocks * rows)
    pages = Pages(torch.zeros(shape).to(E4M3), slots[None].int(), slots, rows, 1, fp8)
    values = torch.randn(blocks * rows, 1, dim)
    if fp8.paged:
        pages.write(slots, values[:, 0])
    else:
        store_kv(values, None, pages.cache, slots, fp8)
    return pages


def some_list(tokens: int, width: int, slots: int) -> SlotList:
    counts = torch.randint(1, width + 1, (tokens,)).int()
    order = torch.rand(tokens, slots).argsort(1)[:, :width].int()
    return SlotList(torch.where(torch.arange(width) < counts[:, None], order, -1), counts)


@pytest.mark.parametrize("heads", [8, 64, 100])
@pytest.mark.parametrize("form", ["V32", "V4", "V4 with entries"])
def test_the_attention_equals_the_reference(
    form: str, heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists of widths that are no multiples, in several calls, for numbers of heads that are not
    the kernel's."""
    monkeypatch.setattr(flash_mla_listed, "_TOKENS", 4)
    torch.manual_seed(heads)
    v4 = form != "V32"
    fp8 = Fp8Cache(torch.float32, latent=512)
    if v4:
        fp8 = Fp8Cache(torch.float32, latent=448, rotary=64, paged=True)
    dim = 512 if v4 else 576
    raw, window = some_pages(fp8, dim, 3, 16), some_list(6, 40, 48)
    entries = chosen = None
    if form == "V4 with entries":
        entries, chosen = some_pages(fp8, dim, 40, 1), some_list(6, 30, 40)
    query, sinks = torch.randn(6, heads, dim), torch.randn(heads) if v4 else None
    args = (query, raw, window, entries, chosen, sinks, 0.05, 512)
    attend = ListedPass(Schedule, decode)
    expected = sparse_attention_reference(*args)
    for _ in range(2):  # two layers share the plans
        torch.testing.assert_close(attend(*args), expected, atol=1e-5, rtol=1e-4)
    other = (query, raw, some_list(6, 40, 48), *args[3:])
    if v4:
        with pytest.raises(AssertionError, match="a stale plan"):
            attend(*other)  # a pass whose lists have other lengths needs an object of its own
    fresh = ListedPass(Schedule, decode)
    expected = sparse_attention_reference(*other)
    torch.testing.assert_close(fresh(*other), expected, atol=1e-5, rtol=1e-4)


def test_the_back_end_plans_each_pass_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    package: Any = ModuleType("flash_mla")
    package.get_mla_metadata = lambda: (Schedule(), None)
    package.flash_mla_with_kvcache = decode
    monkeypatch.setitem(sys.modules, "flash_mla", package)
    fp8 = Fp8Cache(torch.float32, latent=448, rotary=64, paged=True)
    layer: Any = SimpleNamespace(is_compressed=True, fp8=fp8)
    sizes = BuilderSizes(64, 1, 6, 64, torch.bfloat16, torch.device("cpu"))
    builder: Any = FlashMLABackend().create_builder([layer], sizes)
    common: Any = None
    raw, query = some_pages(fp8, 512, 3, 16), torch.randn(6, 64, 512)
    for _ in range(2):  # lists of other lengths
        args = (query, raw, some_list(6, 40, 48), None, None, None, 0.05, 512)
        attended = builder.build(common).create_attend()(*args)
        torch.testing.assert_close(
            attended, sparse_attention_reference(*args), rtol=1e-4, atol=1e-5
        )
    assert builder.builds_on_device and builder.supports is AttentionCGSupport.ALWAYS


class ListedBackend(ReferenceBackend):
    def create_builder(
        self, layers: Sequence[AttentionLayer], sizes: BuilderSizes
    ) -> CompressedBuilder:
        return CompressedBuilder(sizes.block_size, lambda: ListedPass(Schedule, decode))


def test_a_model_of_real_rows_attends_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSeek V4 with rows of 448 + 64 values: chunks and verified rows, each pass with plans of
    its own, give what the reference gives of the same fp8 cache."""
    wide = {"head_dim": 512, "qk_rope_head_dim": 64, "index_head_dim": 64}
    make_v4(tmp_path, **wide)
    model, ids = load(tmp_path), [(7 * n + 3) % 61 for n in range(21)]
    layers = with_fp8_cache(model.attention_layers(), torch.float32, {})
    monkeypatch.setattr(model, "attention_layers", lambda: layers)
    rows = {layer.cache_row(512) for layer in layers if layer.fp8 is not None}
    assert rows == {576} and all(FlashMLABackend.check([x], CPU) == NO_GPU for x in layers)
    with monkeypatch.context() as patch:
        patch.setattr(choice, "is_card", lambda device: True)
        assert choice._preferred(layers, CPU)[0][0] == "flash_mla"
    found = []
    for backend in (ReferenceBackend(), ListedBackend()):
        sequences = Sequences(model, 1, 32, block_size=8, backend=backend)
        cuts = ((0, 11), (11, 12), (12, 15), (15, 21))
        found.append(torch.cat([sequences.step([(0, ids[a:b])])[0][0] for a, b in cuts]))
    torch.testing.assert_close(*found, atol=2e-4, rtol=2e-4)


CPU, NO_GPU = torch.device("cpu"), "it needs a CUDA device"
