"""DeepSeek V3.2: V3 with sparse attention, for which an indexer chooses the tokens.

Each layer has a second cache, of one key a token. The indexer scores every earlier token by these
keys, and latent attention reads the rows of the best `index_topk` alone. Up to that many tokens,
attention is V3's. Formulas: DeepSeek-V3.2 technical report, section 2.1.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ....kernels.attention.compressed.pages import SlotList
from ....kernels.attention.compressed.select_entries import select_entries
from ....kernels.attention.store_kv import store_kv
from ...attention.base import AttentionLayer, AttentionState
from ...errors import ModelLoadError
from ..deepseek import DecoderLayer, DeepseekModel, LatentAttention, make_rotary
from ..deepseek_v4.step import ListedRows
from ..layers import CheckpointSlot, Linear, WeightFormat, tensor_slot
from ..rotary import RotaryEmbedding, RotaryStep

_EPS = 1e-6  # of the indexer's norm
# What Transformers calls a layer with an indexer, since 5.24 and before.
_INDEXED = {"indexed_attention", "deepseek_sparse_attention"}


@dataclass(frozen=True)
class SparseStep(RotaryStep):
    """The rotations of one pass, and the lists of rows that its layers share."""

    halves: RotaryStep | None = None  # the indexer's rotation, of pairs (i, i + rot_dim / 2)
    _listed: list[ListedRows] = field(default_factory=list)  # once the first layer asks

    def rows(self, attention: AttentionState, layer_id: int) -> ListedRows:
        """What the pass's layers share; `layer_id` is any of them."""
        if not self._listed:
            self._listed.append(ListedRows(self.positions, attention, layer_id))
        return self._listed[0]


class SparseRotary(nn.Module):
    """One table of angles, for latent attention and for the indexer, which pairs otherwise."""

    def __init__(self, config: Any, max_position: int, device: torch.device) -> None:
        super().__init__()
        self.pairs = make_rotary(config, max_position, device)
        # a view of the same table
        self.halves = RotaryEmbedding.__new__(RotaryEmbedding)
        nn.Module.__init__(self.halves)
        self.halves.register_buffer("cos_sin_cache", self.pairs.cos_sin_cache, persistent=False)
        self.halves.interleaved = False

    def at(self, positions: Tensor) -> SparseStep:
        """The rotations of tokens at `positions` [M] int64."""
        pairs, halves = self.pairs.at(positions), self.halves.at(positions)
        return SparseStep(**vars(pairs), halves=halves)


class LayerNorm(nn.Module):
    """A norm to mean 0 and deviation 1, in float32."""

    weight: Tensor  # [size] float32
    bias: Tensor  # [size] float32

    def __init__(self, size: int, fmt: WeightFormat) -> None:
        super().__init__()
        for name in ("weight", "bias"):
            empty = torch.empty(size, dtype=torch.float32, device=fmt.device)
            self.register_buffer(name, empty)

    def forward(self, x: Tensor) -> Tensor:
        """Norm x [..., size]."""
        wide = F.layer_norm(x.float(), self.weight.shape, self.weight, self.bias, _EPS)
        return wide.to(x.dtype)

    def checkpoint_slots(self, parent: str, name: str) -> Iterator[tuple[str, CheckpointSlot]]:
        yield f"{parent}{name}.weight", tensor_slot(self.weight, "ones")
        yield f"{parent}{name}.bias", tensor_slot(self.bias, "zeros")


class Indexer(nn.Module):
    """Makes a key for each token, and scores tokens by them. Every rank has a whole one."""

    def __init__(self, config: Any, fmt: WeightFormat) -> None:
        super().__init__()
        hidden, self.dim = config.hidden_size, config.index_head_dim
        self.heads, self.top_k = config.index_n_heads, config.index_topk
        self.scale = (self.heads * self.dim) ** -0.5
        self.wq_b = Linear(config.q_lora_rank, self.heads * self.dim, fmt)
        self.wk = Linear(hidden, self.dim, fmt)
        self.k_norm = LayerNorm(self.dim, fmt)
        self.weights_proj = Linear(hidden, self.heads, fmt)

    def key(self, hidden: Tensor, rotary: RotaryStep) -> Tensor:
        """hidden: [M, H] -> keys [M, 1, D]."""
        return rotary.rotate(self.k_norm.forward(self.wk.forward(hidden)).unsqueeze(1))

    def query(self, hidden: Tensor, low: Tensor, rotary: RotaryStep) -> tuple[Tensor, Tensor]:
        """hidden [M, H], low [M, q_lora_rank] -> queries [M, heads, D] and the heads' weights
        [M, heads] float32, which include all scales."""
        query = self.wq_b.forward(low).view(-1, self.heads, self.dim)
        weights = self.weights_proj.forward(hidden).float() * self.scale
        return rotary.rotate(query), weights


class SparseLatentAttention(LatentAttention):
    """Latent attention to the rows that the indexer chooses."""

    def __init__(self, config: Any, layer_id: int, fmt: WeightFormat) -> None:
        check_v32(config)
        super().__init__(config, layer_id, fmt)
        self.layer = replace(self.layer, reads_lists=True)
        self.indexer = Indexer(config, fmt)
        size = self.indexer.dim
        self.keys = AttentionLayer(
            layer_id + 1, 1, 1, size, scale=1.0, is_mla=True, head_dim_v=size, attends=False
        )

    @property
    def layers(self) -> list[AttentionLayer]:
        return [self.layer, self.keys]

    def forward(self, hidden: Tensor, rotary: RotaryStep, attention: AttentionState) -> Tensor:
        assert isinstance(rotary, SparseStep) and rotary.halves is not None
        query, row, low = self._rows(hidden, rotary)
        step = rotary.rows(attention, self.layer.layer_id)
        rows, keys = step.pages(self.layer), step.pages(self.keys)
        store_kv(row, None, rows.cache, rows.slot_mapping, rows.fp8)
        key = self.indexer.key(hidden, rotary.halves)
        store_kv(key, None, keys.cache, keys.slot_mapping, keys.fp8)
        chosen = self._choose(hidden, low, step, rotary.halves)
        attend, size = step.attend(self.layer), self.latent
        return self._output(attend(query, rows, chosen, None, None, None, self.layer.scale, size))

    def _choose(
        self, hidden: Tensor, low: Tensor, step: ListedRows, rotary: RotaryStep
    ) -> SlotList:
        """The rows that each token attends to."""
        indexer, most = self.indexer, step.most_entries(self.layer)
        if most <= indexer.top_k:  # no token has a choice
            return step.all_entries(self.layer)
        query, weights = indexer.query(hidden, low, rotary)
        keys, rows = step.pages(self.keys), step.pages(self.layer)
        return select_entries(query, weights, keys, rows, step.tokens, indexer.top_k, most)


class SparseLayer(DecoderLayer):
    attention = SparseLatentAttention


class DeepseekV32Model(DeepseekModel):
    block = SparseLayer

    def make_rotary(self, config: Any, max_position: int, device: torch.device) -> Any:
        return SparseRotary(config, max_position, device)


def check_v32(config: Any) -> None:
    """Raise ModelLoadError for what a config of DeepSeek V3.2 may say but this code lacks."""
    if config.q_lora_rank is None:
        raise ModelLoadError("DeepSeek V3.2 is not supported without q_lora_rank.")
    for name in ("index_n_heads", "index_head_dim", "index_topk"):
        if type(getattr(config, name)) is not int or getattr(config, name) < 1:
            raise ModelLoadError(f"{name} of DeepSeek V3.2 must be a positive integer.")
    if config.index_head_dim < config.qk_rope_head_dim:
        raise ModelLoadError(
            f"index_head_dim of DeepSeek V3.2 is {config.index_head_dim}, but its first "
            f"{config.qk_rope_head_dim} values (qk_rope_head_dim) are rotated: it must be no less."
        )
    count, dense = config.num_hidden_layers, config.first_k_dense_replace or 0
    kinds = ["dense"] * min(dense, count) + ["sparse"] * (count - dense)
    if (config.mlp_layer_types or kinds)[:count] != kinds:
        raise ModelLoadError(
            "DeepSeek V3.2 is only supported with first_k_dense_replace dense layers and experts "
            "in all others; mlp_layer_types says otherwise."
        )
    if set(config.layer_types or ()) - _INDEXED:
        raise ModelLoadError("DeepSeek V3.2 is only supported with an indexer in every layer.")
