"""DeepSeek V4's multi-token prediction module: one decoder block over the target's streams.

The row of position p reads the embedding of the token at p + 1, and all residual streams of p,
before the target's last mix: each stream becomes h_proj(hnorm(stream)) + e_proj(enorm(e)). The
block attends to raw rows alone. Its streams are the hidden state of the next draft; a head of its
own mixes them for the logits. The embedding counts as zero at position 0, as in vLLM. The target
provides embeddings and output head.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...kernels.linear.hyper.connections import head_streams
from ..attention.base import AttentionLayer, AttentionState
from ..errors import ModelLoadError
from ..models.deepseek_v4.model import (
    RAW,
    Block,
    HyperConnection,
    RotaryTables,
    check_v4,
    plain_name,
)
from ..models.deepseek_v4.step import Step
from ..models.layers import RMSNorm, WeightFormat
from ..models.sharded import input_linear
from .target_head import TargetHead

TYPE = "deepseek_v4"
PREFIX = "mtp."
_MODULE = re.compile(r"^mtp\.(\d+)\.")
_DSPARK = re.compile(r"^mtp\.\d+\.(main_proj|main_norm|markov\w*)\b")
# Copies of the target's embeddings and output head.
_SHARED = re.compile(r"^mtp\.0\.(emb\.tok_emb|embed|embed_tokens|head|lm_head)\.weight$")


def check_module(names: Sequence[str], source: str) -> None:
    """Raise ModelLoadError unless a checkpoint with these names has one module of this kind."""
    dspark = next((name for name in names if _DSPARK.match(name)), None)
    if dspark is not None:
        raise ModelLoadError(
            f"{source} has a DSpark drafter (tensor {dspark}), which is not supported; method mtp "
            "needs a checkpoint with DeepSeek V4's own mtp.* module."
        )
    modules = sorted({int(found.group(1)) for name in names if (found := _MODULE.match(name))})
    if not modules:
        raise ModelLoadError(
            f"{source} has no {PREFIX}* tensors, which speculative method mtp needs; use a "
            "checkpoint that was stored with its module."
        )
    if modules != [0]:
        raise ModelLoadError(
            f"{source} has {len(modules)} modules for multi-token prediction, but only one is "
            "supported."
        )


class DeepseekV4MtpHead(TargetHead, Block):
    """The module. Hidden states are all streams side by side, [M, n * H]."""

    prefix = f"{PREFIX}0."

    def __init__(
        self, config: Any, fmt: WeightFormat, target: Any, max_position: int, layer_id: int
    ) -> None:
        check_v4(config)
        super().__init__(config, RAW, False, layer_id, fmt)
        hidden, eps, count = config.hidden_size, config.rms_norm_eps, config.hc_mult
        own, theirs = (hidden, count), (target.config.hidden_size, target.config.hc_mult)
        if own != theirs:
            raise ModelLoadError(
                f"the MTP module has {count} streams of {hidden} values, but the target has "
                f"{theirs[1]} of {theirs[0]}."
            )
        self.config, self.format, self.target = config, fmt, [target]
        self.input_width = self.feedback_width = count * hidden
        self.aux_boundaries = (target.config.num_hidden_layers,)  # the streams after all layers
        self.enorm = RMSNorm(hidden, eps, fmt, exact=True)
        self.hnorm = RMSNorm(hidden, eps, fmt, exact=True)
        # The ranks' parts of both are added up at once.
        self.e_proj = input_linear(hidden, hidden, fmt, sums=False)
        self.h_proj = input_linear(hidden, hidden, fmt, sums=False)
        self.norm = RMSNorm(hidden, eps, fmt, exact=True)
        self.hc_head = HyperConnection(config, fmt, is_head=True)
        self.rotary = RotaryTables(config, max_position, fmt)

    def run(
        self,
        input_ids: Tensor,
        positions: Tensor,
        hidden: Tensor,
        attention: AttentionState,
        feedback: Tensor,
        only: Tensor | None = None,
    ) -> Tensor:
        """See `DraftModel.run`; the streams of the rows `only` are fed back."""
        streams = self._streams(input_ids, positions, hidden, attention)
        if only is not None:
            streams = streams[only]
        feedback.copy_(streams.flatten(1))
        return self.norm.forward(head_streams(streams, self.hc_head.site))

    def write_kv(
        self, input_ids: Tensor, positions: Tensor, hidden: Tensor, attention: AttentionState
    ) -> None:
        self._streams(input_ids, positions, hidden, attention)

    def _streams(
        self, input_ids: Tensor, positions: Tensor, hidden: Tensor, attention: AttentionState
    ) -> Tensor:
        """input_ids, positions [M], hidden [M, n * H] -> the block's streams, [M, n, H]."""
        rows, size = hidden.shape[0], self.config.hidden_size
        embedded = self.target[0].embed(input_ids)
        embedded = embedded.masked_fill((positions == 0).unsqueeze(1), 0.0)
        mixed = self.h_proj.forward(self.hnorm.forward(hidden.reshape(-1, size)))
        token = self.e_proj.forward(self.enorm.forward(embedded))
        streams = mixed.view(rows, -1, size) + token.unsqueeze(1)
        if (ranks := self.format.ranks) is not None:
            streams = ranks.sum(streams.flatten(1)).view(streams.shape)
        step = Step(input_ids, positions, attention, self.attn.raw.layer_id)
        return Block.forward(self, streams, step, self.rotary.tables)

    def attention_layers(self) -> list[AttentionLayer]:
        return [self.attn.raw]

    def checkpoint_name(self, name: str) -> str | None:
        """The slot name of a tensor; None for a copy of one of the target's."""
        return None if _SHARED.match(name) else plain_name(name)
