"""The multi-token prediction module of Qwen3-Next and Qwen3.5: one full-attention block.

The row of position p reads the embedding of the token at p + 1, normed, and the target's hidden
state of p, normed. The target provides embeddings and output head.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from ...kernels.linear.streams import norm_pair
from ..attention.base import AttentionLayer, AttentionState
from ..errors import ModelLoadError
from ..models.base import embedded
from ..models.layers import RMSNorm, WeightFormat
from ..models.qwen3_5 import FULL, DecoderLayer, make_rotary
from ..models.sharded import input_linear
from .target_head import TargetHead

PREFIX = "mtp."
TYPES = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


def check_module(config: Any, names: Iterable[str], source: str) -> None:
    """Raise ModelLoadError unless the checkpoint has a module, and one of the form below.

    Quantised copies of these models often lack it.
    """
    if not any(name.startswith(PREFIX) for name in names):
        raise ModelLoadError(
            f"{source} has no {PREFIX}* tensors, which speculative method mtp needs; use a "
            'checkpoint that kept them, or name one as "model".'
        )
    layers = getattr(config, "mtp_num_hidden_layers", None)
    if layers not in (None, 1):
        raise ModelLoadError(
            f"mtp_num_hidden_layers is {layers}, but only modules of one layer are supported."
        )
    if getattr(config, "mtp_use_dedicated_embeddings", False):
        raise ModelLoadError("mtp_use_dedicated_embeddings must be false: that is not supported.")


class QwenMtpHead(TargetHead, nn.Module):
    """The module; `layer_id` is the id of its attention.

    With `post_norm` it reads the target's hidden states after the target's final norm and its own
    after `norm`. Otherwise it reads both before these norms: of the target, the residual stream
    after the last layer.
    """

    prefix = PREFIX

    def __init__(
        self,
        config: Any,
        fmt: WeightFormat,
        target: Any,
        max_position: int,
        layer_id: int,
        post_norm: bool = True,
    ) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        if hidden != target.config.hidden_size:
            raise ModelLoadError(
                f"the MTP module has hidden size {hidden}, but the target has "
                f"{target.config.hidden_size}."
            )
        self.config, self.format, self.target = config, fmt, [target]
        self.input_width = self.feedback_width = hidden
        self.post_norm = post_norm
        layers = target.config.num_hidden_layers
        self.aux_boundaries: tuple[int, ...] = () if post_norm else (layers,)
        self.pre_fc_norm_embedding = RMSNorm(hidden, eps, fmt, offset=1.0)
        self.pre_fc_norm_hidden = RMSNorm(hidden, eps, fmt, offset=1.0)
        self.fc = input_linear(2 * hidden, hidden, fmt)
        block = DecoderLayer(config, None, FULL, layer_id, fmt)
        assert block.self_attn is not None
        self._layer = block.self_attn.layer
        self.layers = nn.ModuleList([block])
        self.norm = RMSNorm(hidden, eps, fmt, offset=1.0)
        self.rotary = make_rotary(config, max_position, fmt)

    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden: Tensor, attention: AttentionState
    ) -> Tensor | tuple[Tensor, Tensor]:
        """input_ids, positions [M], hidden [M, H] -> normalised [M, H], or (normalised, raw)."""
        table, ids = embedded(self.target[0], input_ids)
        weights = self.pre_fc_norm_embedding.weight, self.pre_fc_norm_hidden.weight
        x = norm_pair(table, hidden, weights, self.pre_fc_norm_hidden.eps, ids)
        out, residual = self.layers[0].forward(
            self.fc.forward(x), None, self.rotary.at(positions), attention
        )
        normed, raw = self.norm.add(out, residual)
        return normed if self.post_norm else (normed, raw)

    def attention_layers(self) -> list[AttentionLayer]:
        return [self._layer]

    def checkpoint_name(self, name: str) -> str | None:
        return name
