"""The multi-token prediction module of DeepSeek V3, V3.2 and GLM-4.5: a block after the last.

Formulas: DeepSeek-V3 Technical Report, section 2.2. The row of position p reads the embedding of
the token at p + 1 and the normalised hidden state of p. The target provides embeddings and output
head.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.linear.streams import norm_pair
from ..attention.base import AttentionLayer, AttentionState
from ..errors import ModelLoadError
from ..models.base import embedded
from ..models.deepseek import DecoderLayer as DeepseekLayer
from ..models.deepseek import make_rotary
from ..models.families.deepseek_v32 import SparseLayer, SparseRotary
from ..models.families.glm4_moe import GlmLayer
from ..models.layers import RMSNorm, WeightFormat
from ..models.rotary import RotaryEmbedding, rope_parameters
from ..models.sharded import input_linear
from .target_head import TargetHead

_LAYER = re.compile(r"^model\.layers\.(\d+)\.")
# Copies of the target's tensors: in the module itself, or at the top of a folder of its own.
_SHARED = re.compile(
    r"(?:^model\.|\.)embed_tokens\.weight$|^lm_head\.weight$|\.shared_head\.head\.weight$"
)


class _SharedHead(nn.Module):
    """The norm of `shared_head`; the output head itself is the target's."""

    def __init__(self, size: int, eps: float, fmt: WeightFormat) -> None:
        super().__init__()
        self.norm = RMSNorm(size, eps, fmt)


class MtpModule(TargetHead, nn.Module):
    """The MTP module; `index` is its layer number in the checkpoint, `layer_id` its attention's id.

    A subclass also derives from the target's decoder layer. With `post_norm` the normalised output
    is fed back, as in training; otherwise the raw one.
    """

    aux_boundaries: tuple[int, ...] = ()

    def __init__(
        self,
        config: Any,
        fmt: WeightFormat,
        target: Any,
        max_position: int,
        index: int,
        layer_id: int,
        post_norm: bool = True,
    ) -> None:
        # The module has experts whatever its number.
        number = max(index, config.first_k_dense_replace or 0)
        super().__init__(config, number, layer_id, fmt)
        hidden, eps = config.hidden_size, config.rms_norm_eps
        if hidden != target.config.hidden_size:
            raise ModelLoadError(
                f"the MTP module has hidden size {hidden}, but the target has "
                f"{target.config.hidden_size}."
            )
        self.config, self.format, self.target = config, fmt, [target]
        self.input_width = self.feedback_width = hidden
        self.post_norm, self.prefix = post_norm, f"model.layers.{index}."
        self.hidden_first = bool(getattr(config, "mtp_hidden_states_first", False))
        self.enorm, self.hnorm = RMSNorm(hidden, eps, fmt), RMSNorm(hidden, eps, fmt)
        self.eh_proj = input_linear(2 * hidden, hidden, fmt)
        self.shared_head = _SharedHead(hidden, eps, fmt)
        self.rotary = self.make_rotary(config, max_position, fmt.device)

    def make_rotary(self, config: Any, max_position: int, device: torch.device) -> RotaryEmbedding:
        """The rotary embedding of the block's attention."""
        raise NotImplementedError

    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden: Tensor, attention: AttentionState
    ) -> Tensor | tuple[Tensor, Tensor]:
        """input_ids, positions [M], hidden [M, H] -> normalised [M, H], or (normalised, raw)."""
        table, ids = embedded(self.target[0], input_ids)
        weights = self.enorm.weight, self.hnorm.weight
        both = norm_pair(table, hidden, weights, self.enorm.eps, ids)
        if self.hidden_first:
            both = torch.cat(both.chunk(2, dim=-1)[::-1], dim=-1)
        out = self.eh_proj.forward(both)
        out, residual = super().forward(out, None, self.rotary.at(positions), attention)
        normed, raw = self.shared_head.norm.add(out, residual)
        return normed if self.post_norm else (normed, raw)

    def attention_layers(self) -> list[AttentionLayer]:
        layer: AttentionLayer = self.self_attn.layer  # type: ignore[union-attr,assignment]
        return [layer]

    def checkpoint_name(self, name: str) -> str | None:
        """The slot name of a tensor; None for a copy of one of the target's."""
        return None if _SHARED.search(name) or name.endswith(".rotary_emb.inv_freq") else name


class DeepseekMtpHead(MtpModule, DeepseekLayer):  # type: ignore[misc]
    def make_rotary(self, config: Any, max_position: int, device: torch.device) -> RotaryEmbedding:
        return make_rotary(config, max_position, device)


class DeepseekV32MtpHead(MtpModule, SparseLayer):  # type: ignore[misc]
    """DeepSeek V3.2's module, which has an indexer of its own."""

    def make_rotary(self, config: Any, max_position: int, device: torch.device) -> Any:
        return SparseRotary(config, max_position, device)

    def attention_layers(self) -> list[AttentionLayer]:
        return self.self_attn.layers


class GlmMtpHead(MtpModule, GlmLayer):  # type: ignore[misc]
    def make_rotary(self, config: Any, max_position: int, device: torch.device) -> RotaryEmbedding:
        head_dim = self.self_attn.head_dim
        return RotaryEmbedding(rope_parameters(config), head_dim, max_position, device)


def module_index(names: list[str], num_target_layers: int) -> int:
    """The module's layer number in a checkpoint: after the target's layers, or 0 in a folder of its
    own."""
    layers = {int(found.group(1)) for name in names if (found := _LAYER.match(name))}
    return 0 if layers == {0} else num_target_layers
