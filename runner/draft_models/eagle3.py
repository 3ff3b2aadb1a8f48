"""The EAGLE-3 head: decoder layers over embeddings and the target's auxiliary hidden states.

Formulas: EAGLE-3 (Li et al. 2025). Layer 0 projects queries, keys and values from the normalised
embedding and the normalised hidden state side by side; further layers are Llama layers.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.linear.streams import norm_pair
from ...speculators.draft_head import PickTokens
from ..attention.base import AttentionLayer, AttentionState
from ..errors import ModelLoadError
from ..models.base import EmbeddedIds, embedded, embedded_by
from ..models.layers import CheckpointSlot, RMSNorm, WeightFormat, module_slots
from ..models.llama import MLP, Attention, DecoderLayer, rows_by_block, selected
from ..models.native import NativeDecoder
from ..models.rotary import RotaryEmbedding, RotaryStep, rope_parameters
from ..models.sharded import head as output_head
from ..models.sharded import input_linear, qkv_linear, table
from .draft_config import DraftHeadConfig


class FirstLayer(DecoderLayer):
    """A decoder layer that reads the embedding beside the hidden state."""

    def __init__(
        self, config: Any, layer_id: int, fmt: WeightFormat, norm_before_residual: bool
    ) -> None:
        super().__init__(config, 0, layer_id, fmt)
        attention: Attention = self.self_attn
        heads = config.num_attention_heads, config.num_key_value_heads
        attention.qkv_proj = qkv_linear(
            2 * config.hidden_size,
            (heads[0], heads[1] or heads[0]),
            attention.head_dim,
            fmt,
            attention.qkv_proj.bias is not None,
            "qkv",
        )
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, fmt)
        self.norm_before_residual = norm_before_residual

    def first(
        self,
        embedding: EmbeddedIds,
        hidden: Tensor,  # [M, H]
        rotary: RotaryStep,
        attention: AttentionState,
        only: Tensor | None = None,  # [N] int64
    ) -> tuple[Tensor, Tensor]:
        """Returns (output or its parts, residual) as `DecoderLayer.forward`; the stream is their
        sum."""
        out, normed = self.attend(embedding, hidden, rotary, attention, only)
        residual = normed if self.norm_before_residual else hidden
        out, residual = self.post_attention_layernorm.add(out, residual, only)
        assert isinstance(self.mlp, MLP)
        return self.mlp.parts(out), residual

    def attend(
        self,
        embedding: EmbeddedIds,
        hidden: Tensor,
        rotary: RotaryStep,
        attention: AttentionState,
        only: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The layer up to its MLP. Returns (attention's output or its parts, for the rows `only` if
        given; the normalised hidden state of all rows)."""
        both, normed = self._normed(embedding, hidden)
        return self.self_attn.forward(both, rotary, attention, only=only), normed

    def _normed(self, embedding: EmbeddedIds, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(embedding and hidden state side by side, both normalised, [M, 2H]; the latter part)."""
        weights = self.input_layernorm.weight, self.hidden_norm.weight
        both = norm_pair(embedding[0], hidden, weights, self.hidden_norm.eps, embedding[1])
        return both, both[:, hidden.shape[1] :]

    def inputs(self, embedding: EmbeddedIds, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(the input of the query, key and value projection [M, 2H]; a copy of the residual stream
        [M, H])."""
        both, normed = self._normed(embedding, hidden)
        residual = normed if self.norm_before_residual else hidden
        return both, residual.clone(memory_format=torch.contiguous_format)


class Eagle3Head(nn.Module):
    """An EAGLE-3 draft head; attention layer i has the id `layer_id_offset + i`."""

    draft_to_target: Tensor | None  # [draft vocabulary] int64 target ids; None = the same ids

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
        hidden, self.aux_boundaries = config.hidden_size, head.aux_boundaries
        self.input_width = len(head.aux_boundaries) * head.target_hidden_size
        self.feedback_width = hidden
        self.fc = input_linear(self.input_width, hidden, fmt, head.fc_bias)
        if head.norm_before_fc:
            self.input_norm = RMSNorm(self.input_width, config.rms_norm_eps, fmt)
        self.layers = nn.ModuleList(
            FirstLayer(config, layer_id_offset, fmt, head.norm_before_residual)
            if index == 0
            else DecoderLayer(config, index, layer_id_offset + index, fmt)
            for index in range(config.num_hidden_layers)
        )
        self.blocks: list[DecoderLayer] = [*self.layers]
        self.norm = RMSNorm(hidden, config.rms_norm_eps, fmt)
        self.embed_tokens = table(config.vocab_size, hidden, fmt)
        self.lm_head = output_head(hidden, head.draft_vocab_size, fmt)
        head_dim = self.blocks[0].self_attn.head_dim
        self.rotary = RotaryEmbedding(rope_parameters(config), head_dim, max_position, fmt.device)
        self.decoder: NativeDecoder | None = None  # runs the blocks where it can
        if fmt.native and fmt.ranks is None:  # it runs layers without collectives
            rotaries = [self.rotary] * len(self.blocks)
            self.decoder = NativeDecoder(self.blocks, self.attention_layers(), rotaries)
        self._loaded: set[str] = set()
        self._offsets: Tensor | None = None  # d2t
        self._has_draft_id: Tensor | None = None  # t2d
        self.register_buffer("draft_to_target", None, persistent=False)

    def combine(self, target_hidden: Tensor) -> Tensor:
        """Auxiliary hidden states side by side, [M, boundaries * H_target] -> [M, H]."""
        if self.head.norm_before_fc:
            target_hidden = self.input_norm.forward(target_hidden)
        return self.fc.forward(target_hidden)

    def run(
        self,
        input_ids: Tensor,
        positions: Tensor,
        hidden: Tensor,
        attention: AttentionState,
        feedback: Tensor,
        only: Tensor | None = None,
    ) -> Tensor:
        """See `DraftModel.run`: the normalised stream gives the logits, the raw one is fed back."""
        return self.forward(input_ids, positions, hidden, attention, only, feedback)[0]

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        hidden: Tensor,
        attention: AttentionState,
        only: Tensor | None = None,
        feedback: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """input_ids, positions [M], hidden [M, H] -> (normalised stream, raw stream), [N, H] each.

        N are the rows `only` [N] int64, or all M. The raw stream is written to `feedback` if given,
        which may be the memory of `hidden`.
        """
        first = self.blocks[0]
        assert isinstance(first, FirstLayer)
        residual: Tensor | None
        embedding = self._embed(input_ids)
        if self.decoder is not None and self.decoder.runs(attention):
            both, stream = first.inputs(embedding, hidden)
            self.decoder.run(stream, positions, attention, first_input=both)
            return self.norm.add(selected(stream, only), None, stream=feedback)
        rotary = self.rotary.at(positions)
        wanted = rows_by_block(len(self.blocks), only)
        out, residual = first.first(embedding, hidden, rotary, attention, wanted[0])
        for block, rows in zip(self.blocks[1:], wanted[1:], strict=True):
            out, residual = block.forward(out, residual, rotary, attention, rows)
        return self.norm.add(out, residual, stream=feedback)

    def write_kv(
        self, input_ids: Tensor, positions: Tensor, hidden: Tensor, attention: AttentionState
    ) -> None:
        """Write the KV that `forward` would write; a head of one layer skips its MLP."""
        first = self.blocks[0]
        assert isinstance(first, FirstLayer)
        if self.decoder is not None and self.decoder.runs(attention):
            both, stream = first.inputs(self._embed(input_ids), hidden)
            self.decoder.run(stream, positions, attention, first_input=both)
            return
        if len(self.blocks) > 1:
            self.forward(input_ids, positions, hidden, attention)
            return
        first.attend(self._embed(input_ids), hidden, self.rotary.at(positions), attention)

    @property
    def pick_tokens(self) -> PickTokens | None:
        """See `TextModel.pick_tokens`; ids are the draft vocabulary's."""
        if "lm_head" in self._loaded:
            return self.lm_head.pick if self.lm_head.can_pick else None
        pick: PickTokens | None = getattr(self.target[0], "pick_tokens", None)
        return pick

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[N, H] -> [N, draft vocabulary]."""
        if "lm_head" in self._loaded:
            return self.lm_head.forward(hidden)
        logits: Tensor = self.target[0].compute_logits(hidden)
        return logits

    def _embed(self, input_ids: Tensor) -> EmbeddedIds:
        if "embed_tokens" in self._loaded:
            return embedded_by(self.embed_tokens, input_ids)
        return embedded(self.target[0], input_ids)

    def attention_layers(self) -> list[AttentionLayer]:
        return [block.self_attn.layer for block in self.blocks]

    # --- checkpoint -------------------------------------------------------------------------------

    def checkpoint_slots(self) -> dict[str, CheckpointSlot]:
        """Checkpoint name -> slot of the tensor. Embeddings, output head and vocabulary maps are
        optional."""
        slots = module_slots(self)
        for name in ("embed_tokens", "lm_head"):
            slot = slots[f"{name}.weight"]
            load = functools.partial(self._load_own, name, slot.load)
            shared = name == "embed_tokens" or not self._has_map
            slots[f"{name}.weight"] = replace(slot, load=load, optional=shared)
        draft, vocab = self.head.draft_vocab_size, self.config.vocab_size
        slots["d2t"] = CheckpointSlot(
            (draft,), self._load_offsets, "zeros", optional=not self._has_map
        )
        slots["t2d"] = CheckpointSlot((vocab,), self._load_has_draft_id, "zeros", optional=True)
        return slots

    def checkpoint_name(self, name: str) -> str | None:
        """The slot name of a tensor in any format; None for one that is not needed, such as the
        target's own weights."""
        name = name.removeprefix("model.")
        if name.startswith("verifier_") or name.endswith("rotary_emb.inv_freq"):
            return None
        return name.replace("midlayer.", "layers.0.", 1)

    @property
    def _has_map(self) -> bool:
        return bool(self.head.draft_vocab_size != self.config.vocab_size)

    def finish_loading(self, dummy: bool = False) -> None:
        """Check the vocabulary map, and share the target's tensors where the checkpoint has none.

        Raises ModelLoadError.
        """
        draft, vocab = self.head.draft_vocab_size, self.config.vocab_size
        if self._offsets is not None and self._has_map:
            ids = self._offsets
            known = not ids.is_meta  # a meta tensor has no values to check
            if known:
                ids = torch.arange(draft, device=ids.device) + ids
            if known and (int(ids.max()) >= vocab or int(ids.min()) < 0):
                raise ModelLoadError(
                    "the drafter's tensor d2t maps to ids outside the target's vocabulary."
                )
            has_id = self._has_draft_id if known and not dummy else None
            if has_id is not None and not has_id[ids].all():
                raise ModelLoadError(
                    "the drafter's d2t and t2d contradict each other: its tensor d2t maps draft "
                    "tokens to tokens that t2d does not mark."
                )
            self.draft_to_target = ids
        target = self.target[0].config
        if "embed_tokens" not in self._loaded and target.hidden_size != self.config.hidden_size:
            raise ModelLoadError(
                "the drafter has no embeddings and its hidden size is not the target's."
            )
        if "lm_head" not in self._loaded:
            if self._has_map or target.hidden_size != self.config.hidden_size:
                raise ModelLoadError("the drafter has no lm_head and cannot use the target's.")
            del self.lm_head
        if "embed_tokens" not in self._loaded:
            del self.embed_tokens

    def _load_own(self, name: str, load: Any, tensor: Tensor) -> None:
        load(tensor)
        self._loaded.add(name)

    def _load_offsets(self, tensor: Tensor) -> None:
        self._offsets = tensor.to(self.format.device, torch.int64)

    def _load_has_draft_id(self, tensor: Tensor) -> None:
        self._has_draft_id = tensor.to(self.format.device).bool()
