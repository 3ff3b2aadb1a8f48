"""DeepSeek V4's attention: the newest raw rows, and compressed entries of everything before.

Layers differ by their compression ratio r: 0 has raw rows alone; a large r attends to all entries;
a small one has overlapping windows and an indexer, which chooses the entries of each token. What a
compressor has not compressed yet is cached by position, too, so that a rejected draft leaves
nothing behind: the true tokens overwrite it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ....kernels.attention.compressed.compress import compress
from ....kernels.attention.compressed.pages import Compressor, SlotList
from ....kernels.attention.compressed.select_entries import select_entries
from ....kernels.attention.compressed.store_rows import store_rows
from ....kernels.attention.compressed.tail_rotary import tail_rotary
from ....kernels.attention.mla import expand_value
from ....kernels.attention.store_kv import store_kv
from ...attention.base import AttentionLayer
from ...parallel.ranks import Cut
from ..layers import CheckpointSlot, Linear, RMSNorm, WeightFormat, tensor_slot
from ..sharded import column_linear, row_linear
from .step import Step, Tables

_RAW_BLOCK = 64  # the most tokens in a block of raw rows
_PENDING_BLOCK = 8  # and of pending rows, at least: few are live, and each is large


class GroupedLinear(nn.Module):
    """A matrix product for each group of heads: the first half of the output projection."""

    weight: Tensor  # [groups, rank, inputs of a group]

    def __init__(
        self, groups: int, share: Cut | None, rank: int, inputs: int, fmt: WeightFormat
    ) -> None:
        """`share`: those of the `groups` that are here, if not all."""
        super().__init__()
        self.total, self.share = groups * rank, share
        own = groups if share is None else share.size
        empty = torch.empty(own, rank, inputs, dtype=fmt.dtype, device=fmt.device)
        self.register_buffer("weight", empty)

    def forward(self, x: Tensor) -> Tensor:
        """x: [M, groups, inputs] -> [M, groups * rank]."""
        return expand_value(x, self.weight).reshape(x.shape[0], -1)

    def checkpoint_slots(self, parent: str, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        slot = tensor_slot(self.weight.flatten(0, 1))
        yield f"{parent}{name}.weight", _part_of(slot, self.total, self.share, self.weight.shape[1])


def _part_of(slot: CheckpointSlot, total: int, share: Cut | None, each: int) -> CheckpointSlot:
    """The slot of a part of `total` rows, `each` for every one in `share`; all rows without it."""
    if share is None:
        return slot
    cut = Cut(0, share.start * each, share.stop * each)
    return replace(slot, shape=(total, *slot.shape[1:]), cut=cut)


class CompressorWeights(nn.Module):
    """A compressor's weights besides its projections, which are part of a fused one."""

    ape: Tensor  # [r, width] float32, a bias by place in the window

    def __init__(self, ratio: int, dim: int, overlap: bool, eps: float, fmt: WeightFormat) -> None:
        super().__init__()
        self.ratio, self.dim, self.overlap, self.eps = ratio, dim, overlap, eps
        self.width = 2 * dim if overlap else dim
        ape = torch.empty(ratio, self.width, dtype=torch.float32, device=fmt.device)
        self.register_buffer("ape", ape)
        self.norm = RMSNorm(dim, eps, fmt, exact=True)

    def rule(self, column: int, cos_sin_cache: Tensor) -> Compressor:
        """The compressor of pending rows that hold its kv, then its gate, from `column` on."""
        gate = column + self.width
        return Compressor(
            self.ratio, self.dim, self.overlap, column, gate, self.ape, self.norm.weight, self.eps,
            cos_sin_cache,
        )  # fmt: skip

    def checkpoint_slots(self, parent: str, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        yield f"{parent}{name}.ape", tensor_slot(self.ape, "zeros")


class Indexer(nn.Module):
    """Chooses entries. It has a small compressor of its own, which makes a key for each entry."""

    def __init__(self, config: Any, ratio: int, fmt: WeightFormat) -> None:
        super().__init__()
        self.heads, self.dim = config.index_n_heads, config.index_head_dim
        self.top_k = config.index_topk
        self.scale = (self.heads * self.dim) ** -0.5
        self.compressor = CompressorWeights(ratio, self.dim, True, config.rms_norm_eps, fmt)
        self.wq_b = Linear(config.q_lora_rank, self.heads * self.dim, fmt)


def attention_layers(
    config: Any, ratio: int, indexed: bool, layer_id: int, sinks: Tensor
) -> dict[str, AttentionLayer]:
    """The caches of a layer by what they hold; their ids begin at `layer_id`. `sinks` [heads]."""
    dim, eps_scale = config.head_dim, config.head_dim**-0.5
    raw = AttentionLayer(
        layer_id, len(sinks), 1, dim,
        scale=eps_scale, sliding_window=config.sliding_window, sinks=sinks, is_mla=True,
        head_dim_v=dim, block_tokens=_RAW_BLOCK, rotary_tail=config.qk_rope_head_dim,
    )  # fmt: skip
    layers = {"raw": raw}
    if not ratio:
        return layers

    def stored(
        width: int,
        tokens: int = 1,
        window: int | None = None,
        block: int | None = None,
        follows: int | None = None,
    ) -> AttentionLayer:
        return AttentionLayer(
            layer_id + len(layers), 1, 1, width,
            scale=1.0, sliding_window=window, is_mla=True, head_dim_v=width,
            entry_tokens=tokens, block_tokens=block, attends=False,
            window_step=ratio if window else 1, follows=follows,
        )  # fmt: skip

    entries = stored(dim, ratio, follows=layer_id)
    layers["entries"] = replace(entries, rotary_tail=raw.rotary_tail)
    pending = 2 * dim
    if indexed:
        layers["keys"] = stored(config.index_head_dim, ratio)
        pending = 4 * (dim + config.index_head_dim)
    window = 2 * ratio if indexed else ratio
    layers["pending"] = stored(pending, 1, window, max(_PENDING_BLOCK, window // 8))
    return layers


class Attention(nn.Module):
    """One attention layer of compression ratio `ratio`; `indexed` layers choose entries.

    Ranks share the query heads, by the groups of the output projection. Each has everything else.
    """

    attn_sink: Tensor  # [heads] float32

    def __init__(
        self, config: Any, ratio: int, indexed: bool, layer_id: int, fmt: WeightFormat
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        groups, self.total = config.o_groups, config.num_attention_heads
        self.share: Cut | None = None
        if fmt.ranks is not None:
            self.share = fmt.ranks.share(groups, "groups of attention heads")
        self.groups = groups if self.share is None else self.share.size
        self.heads = self.total // groups * self.groups
        self.dim, self.rank = config.head_dim, config.q_lora_rank
        self.ratio, self.eps = ratio, eps
        sinks = torch.empty(self.heads, dtype=torch.float32, device=fmt.device)
        self.register_buffer("attn_sink", sinks)
        layers = attention_layers(config, ratio, indexed, layer_id, sinks)
        self.raw, self.layers = layers["raw"], layers
        self.down = Linear(hidden, {"wq_a": self.rank, "wkv": self.dim}, fmt)
        self.q_norm = RMSNorm(self.rank, eps, fmt, exact=True)
        self.wq_b = column_linear(self.rank, self.total * self.dim, fmt, groups=groups)
        self.kv_norm = RMSNorm(self.dim, eps, fmt, exact=True)
        inputs = self.total * self.dim // groups
        self.wo_a = GroupedLinear(groups, self.share, config.o_lora_rank, inputs, fmt)
        self.wo_b = row_linear(groups * config.o_lora_rank, hidden, fmt, groups=groups)
        self.compressor: CompressorWeights | None = None
        self.indexer: Indexer | None = None
        if ratio:
            self.compressor = CompressorWeights(ratio, self.dim, indexed, eps, fmt)
            shards = {"compressor.wkv": self.compressor.width}
            shards["compressor.wgate"] = self.compressor.width
            if indexed:
                self.indexer = Indexer(config, ratio, fmt)
                width = self.indexer.compressor.width
                shards["indexer.compressor.wkv"] = shards["indexer.compressor.wgate"] = width
                shards["indexer.weights_proj"] = self.indexer.heads
            # All that compressor and indexer project from the hidden states: one product, or one
            # each on a CPU, since a native matrix has fewer parts.
            names = list(shards)
            cut = 2 if fmt.native else len(names)
            self.side = Linear(hidden, {name: shards[name] for name in names[:cut]}, fmt)
            if names[cut:]:
                self.more_side = Linear(hidden, {name: shards[name] for name in names[cut:]}, fmt)
            self.has_more = bool(names[cut:])

    def forward(self, hidden: Tensor, step: Step, tables: Tables) -> Tensor:
        """hidden: [M, H] -> [M, H]."""
        num_tokens, positions = hidden.shape[0], step.tokens.positions
        table = tables.compressed if self.ratio else tables.main
        down = self.down.forward(hidden)
        low, row = self.q_norm.forward(down[:, : self.rank]), down[:, self.rank :]
        query = self.wq_b.forward(low).view(num_tokens, self.heads, self.dim)
        query = tail_rotary(query, positions, table, self.eps)
        row = tail_rotary(row.unsqueeze(1), positions, table, self.eps, self.kv_norm.weight)
        raw, window = step.pages(self.raw), step.window(self.raw)
        store_rows(row, raw)
        if self.compressor is None:
            attend = step.attend(self.raw)
            out = attend(query, raw, window, None, None, self.attn_sink, self.raw.scale)
        else:
            chosen = self._entries(hidden, low, step, table)
            entries, attend = self.layers["entries"], step.attend(self.layers["entries"])
            pages = step.pages(entries)
            out = attend(query, raw, window, pages, chosen, self.attn_sink, self.raw.scale)
        out = tail_rotary(out, positions, table, inverse=True)
        return self.wo_b.forward(self.wo_a.forward(out.view(num_tokens, self.groups, -1)))

    def _entries(self, hidden: Tensor, low: Tensor, step: Step, table: Tensor) -> SlotList:
        """Write the entries that this pass completes; return those that each token attends to.

        hidden: [M, H]; low: [M, q_lora_rank], from which the indexer makes its queries.
        """
        assert self.compressor is not None
        side = self.side.forward(hidden)
        if self.has_more:
            side = torch.cat((side, self.more_side.forward(hidden)), dim=1)
        pending = step.pages(self.layers["pending"])
        width = pending.cache.shape[-1]
        store_kv(side[:, :width].unsqueeze(1), None, pending.cache, pending.slot_mapping)
        entries = step.pages(self.layers["entries"])
        compress(self.compressor.rule(0, table), pending, step.tokens, entries)
        if self.indexer is None:
            return step.all_entries(self.layers["entries"])
        indexer = self.indexer
        keys = step.pages(self.layers["keys"])
        rule = indexer.compressor.rule(2 * self.compressor.width, table)
        compress(rule, pending, step.tokens, keys)
        most = step.most_entries(self.layers["keys"])
        if most <= indexer.top_k:  # no token has a choice
            return step.all_entries(self.layers["entries"])
        query = indexer.wq_b.forward(low).view(-1, indexer.heads, indexer.dim)
        query = tail_rotary(query, step.tokens.positions, table)
        weights = side[:, width:].float() * indexer.scale
        return select_entries(query, weights, keys, entries, step.tokens, indexer.top_k, most)

    def checkpoint_slots(self, parent: str, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        slot, each = tensor_slot(self.attn_sink, "zeros"), self.heads // self.groups
        yield f"{parent}{name}.attn_sink", _part_of(slot, self.total, self.share, each)
