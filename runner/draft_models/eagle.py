"""The EAGLE-1 head (EAGLE-2 has the same): a Llama layer over embedding and final hidden state.

Formulas: EAGLE (Li et al. 2024). Layer 0 has no input norm, there is no final norm, and the logits
come from the target's output head.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ...kernels.linear.streams import norm_pair, write_stream
from ..attention.base import AttentionLayer, AttentionState
from ..errors import ModelLoadError
from ..models.base import embedded, embedded_by
from ..models.layers import CheckpointSlot, RMSNorm, WeightFormat, module_slots
from ..models.llama import MLP, DecoderLayer, rows_by_block
from ..models.rotary import RotaryEmbedding, rope_parameters
from ..models.sharded import input_linear, table
from .draft_config import DraftHeadConfig
from .target_head import TargetHead

# Names of the `speculators` format -> SafeAILab's.
_RENAMED = (("fusion_fc.", "fc."), ("transformer.", "layers.0."))


class EagleHead(TargetHead, nn.Module):
    """An EAGLE-1 draft head; attention layer i has the id `layer_id_offset + i`."""

    aux_boundaries: tuple[int, ...] = ()

    def __init__(
        self,
        head: DraftHeadConfig,
        config: Any,
        fmt: WeightFormat,
        target: Any,
        max_position: int,
        layer_id_offset: int,
    ) -> None:
        super().__init__()
        self.head, self.config, self.format, self.target = head, config, fmt, [target]
        hidden = config.hidden_size
        self.input_width = self.feedback_width = hidden
        if head.target_hidden_size != hidden:
            raise ModelLoadError("an EAGLE-1 head must have the target's hidden size.")
        self.fc = input_linear(2 * hidden, hidden, fmt, head.fc_bias)
        if head.para_norm:
            self.embedding_layernorm = RMSNorm(hidden, config.rms_norm_eps, fmt)
            self.hidden_states_layernorm = RMSNorm(hidden, config.rms_norm_eps, fmt)
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, layer_id_offset + index, fmt)
            for index in range(config.num_hidden_layers)
        )
        self.blocks: list[DecoderLayer] = [*self.layers]
        del self.blocks[0].input_layernorm
        self.embed_tokens = table(config.vocab_size, hidden, fmt)
        head_dim = self.blocks[0].self_attn.head_dim
        self.rotary = RotaryEmbedding(rope_parameters(config), head_dim, max_position, fmt.device)
        self._own_embeddings = False

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        hidden: Tensor,
        attention: AttentionState,
        feedback: Tensor | None = None,
        only: Tensor | None = None,
    ) -> Tensor:
        """Return the output hidden states [N, H] of input_ids, positions [M] and hidden [M, H].

        `only` [N] int64 names the token rows to return; None means all M. If `feedback` is given,
        the result is written there. It may be the memory of `hidden`.
        """
        weights, eps = None, 0.0
        if self.head.para_norm:
            weights = self.embedding_layernorm.weight, self.hidden_states_layernorm.weight
            eps = self.embedding_layernorm.eps
        table, ids = (
            embedded_by(self.embed_tokens, input_ids)
            if self._own_embeddings
            else embedded(self.target[0], input_ids)
        )
        stream = self.fc.forward(norm_pair(table, hidden, weights, eps, ids))
        rotary = self.rotary.at(positions)
        wanted = rows_by_block(len(self.blocks), only)
        first = self.blocks[0]
        out = first.self_attn.forward(stream, rotary, attention, only=wanted[0])
        residual: Tensor | None
        out, residual = first.post_attention_layernorm.add(out, stream, wanted[0])
        assert isinstance(first.mlp, MLP)
        out = first.mlp.parts(out)
        for block, rows in zip(self.blocks[1:], wanted[1:], strict=True):
            out, residual = block.forward(out, residual, rotary, attention, rows)
        return write_stream(out, residual, feedback)

    run = forward

    def attention_layers(self) -> list[AttentionLayer]:
        return [block.self_attn.layer for block in self.blocks]

    def checkpoint_slots(self) -> dict[str, CheckpointSlot]:
        """Checkpoint name -> slot of the tensor; own embeddings are optional."""
        slots = module_slots(self)
        slot = slots["embed_tokens.weight"]
        load = functools.partial(self._load_embeddings, slot.load)
        slots["embed_tokens.weight"] = replace(slot, load=load, optional=True)
        return slots

    def checkpoint_name(self, name: str) -> str | None:
        """Names of all formats -> ours."""
        name = name.removeprefix("model.")
        if name.startswith("verifier_") or name.endswith("rotary_emb.inv_freq"):
            return None
        for theirs, ours in _RENAMED:
            if name.startswith(theirs):
                return ours + name.removeprefix(theirs)
        return name

    def finish_loading(self, dummy: bool = False) -> None:
        """Drop the unused table where the target's embeddings serve."""
        if not self._own_embeddings:
            del self.embed_tokens

    def _load_embeddings(self, load: Any, tensor: Tensor) -> None:
        load(tensor)
        self._own_embeddings = True
