"""Gemma 4's assistant: a small decoder without keys and values, which reads the target's caches.

Formulas: the released `gemma4_assistant` checkpoints. Every layer attends over the cache of the
target's last layer of its type that has one; nothing is ever written.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...speculators.draft_head import DraftHead
from ..attention.base import AttentionLayer, AttentionState
from ..errors import ModelLoadError
from ..models.gemma3 import check_gelu, soft_cap, text_name
from ..models.gemma4 import Attention, DecoderLayer, kv_source, make_norm, make_rotary
from ..models.layers import CheckpointSlot, Embedding, Linear, WeightFormat, module_slots
from ..models.sharded import head, input_linear

_TABLE = "model.embed_tokens.weight"


class OrderedHead(nn.Module):
    """Scores only the tokens of the clusters with the best centroids; all others get -inf.

    The number of candidates is fixed, so it can be recorded in a graph.
    """

    def __init__(self, config: Any, hidden: int, vocab: int, fmt: WeightFormat) -> None:
        super().__init__()
        count = config.num_centroids
        if vocab % count:
            raise ModelLoadError(
                f"the assistant's {vocab} tokens cannot be divided into {count} equal clusters."
            )
        self.top_k, self.vocab = min(config.centroid_intermediate_top_k, count), vocab
        self.centroids = Linear(hidden, count, fmt)
        members = torch.zeros(count, vocab // count, dtype=torch.int64, device=fmt.device)
        self.register_buffer("members", members)  # [clusters, size] token ids

    members: Tensor

    def forward(self, hidden: Tensor, table: Embedding) -> Tensor:
        """hidden [N, h], table [V, h] -> logits [N, V]."""
        clusters = self.centroids.forward(hidden).topk(self.top_k, dim=-1).indices
        ids = self.members[clusters].flatten(1)  # [N, candidates]
        scores = torch.bmm(table.forward(ids), hidden[:, :, None])[..., 0]
        out = torch.full(
            (hidden.shape[0], self.vocab), float("-inf"), dtype=scores.dtype, device=hidden.device
        )
        return out.scatter_(1, ids, scores)

    def load_ordering(self, ordering: Tensor) -> None:
        """Set the clusters; ordering: [V] token ids, cluster by cluster. Raises ModelLoadError if
        it does not list every token once."""
        ids = ordering.to(self.members.device, torch.int64)
        every = torch.arange(self.vocab, device=ids.device)
        if not (ids.is_meta or torch.equal(ids.sort().values, every)):
            raise ModelLoadError("the assistant's token_ordering does not list every token once.")
        self.members.copy_(ids.view_as(self.members))


class Gemma4Assistant(DraftHead, nn.Module):
    """Gemma 4's assistant; attention layer i has the id `layer_id_offset + i`."""

    aux_boundaries: tuple[int, ...] = ()
    input_width = 1  # unused: the first draft starts from single rows of the target's hidden states

    def __init__(
        self,
        config: Any,  # of the assistant, with text_config
        fmt: WeightFormat,
        target: Any,
        max_position: int,
        layer_id_offset: int,
        suppressed: tuple[int, ...] = (),
    ) -> None:
        super().__init__()
        text = config.text_config
        check_gelu(text)
        _check_target(config, target)
        self.config, self.format, self.target = text, fmt, [target]
        hidden, backbone = text.hidden_size, config.backbone_hidden_size
        self.feedback_width = backbone
        self.blocks = [
            _make_block(text, index, layer_id_offset + index, fmt, target)
            for index in range(text.num_hidden_layers)
        ]
        self.layers = nn.ModuleList(self.blocks)
        self.norm = make_norm(hidden, text, fmt)
        self.pre_projection = input_linear(2 * backbone, hidden, fmt)
        self.post_projection = input_linear(hidden, backbone, fmt)
        self.ordered = bool(config.use_ordered_embeddings)
        if self.ordered:
            self.embed_tokens = Embedding(text.vocab_size, hidden, fmt)
            self.masked_embedding = OrderedHead(config, hidden, text.vocab_size, fmt)
        else:
            self.lm_head = head(hidden, text.vocab_size, fmt)
        self.rotary = make_rotary(text, max_position, fmt.device)
        # A tensor that exists before any capture: a graph cannot index by a Python list.
        ids = torch.tensor(suppressed, dtype=torch.int64, device=fmt.device)
        self.register_buffer("suppressed", ids if suppressed else None)

    suppressed: Tensor | None

    def forward(
        self, input_ids: Tensor, positions: Tensor, hidden: Tensor, attention: AttentionState
    ) -> tuple[Tensor, Tensor]:
        """input_ids, positions [N], hidden [N, B] -> [N, h] for the logits, [N, B] to feed back."""
        embedding = self.target[0].embed(input_ids)
        stream = self.pre_projection.forward(torch.cat([embedding, hidden], dim=-1))
        rotary = {kind: table.at(positions) for kind, table in self.rotary.items()}
        for block in self.blocks:
            stream = block.forward(stream, None, rotary, attention)
        normed = self.norm.forward(stream)
        return normed, self.post_projection.forward(normed)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[N, h] -> [N, V], by the assistant's own embeddings."""
        if self.ordered:
            logits = self.masked_embedding.forward(hidden, self.embed_tokens)
        else:
            cap = self.config.final_logit_softcapping
            logits = soft_cap(self.lm_head.forward(hidden), cap)
        if self.suppressed is not None:
            logits.index_fill_(1, self.suppressed, float("-inf"))
        return logits

    def attention_layers(self) -> list[AttentionLayer]:
        return [block.self_attn.layer for block in self.blocks]

    # --- checkpoint -------------------------------------------------------------------------------

    def checkpoint_slots(self) -> dict[str, CheckpointSlot]:
        slots = module_slots(self)
        for name in list(slots):
            if name.startswith(("layers.", "norm.", "embed_tokens.")):
                slots[f"model.{name}"] = slots.pop(name)
        if self.ordered:
            ordering = CheckpointSlot(
                (self.config.vocab_size,), self.masked_embedding.load_ordering, "zeros"
            )
            slots["masked_embedding.token_ordering"] = ordering
        else:
            slots[_TABLE] = slots.pop("lm_head.weight")
        # the tied head, which some checkpoints store as well
        slots["lm_head.weight"] = replace(slots[_TABLE], load=lambda tensor: None, optional=True)
        return slots

    def checkpoint_name(self, name: str) -> str | None:
        """The slot name of a tensor in a multimodal checkpoint; None for one that is not needed,
        such as keys and values."""
        text = text_name(name)
        if text is None or ".self_attn.k_" in text or ".self_attn.v_" in text:
            return None
        return None if text.endswith("rotary_emb.inv_freq") else text

    def finish_loading(self, dummy: bool = False) -> None:
        """Give random weights an ordering that lists every token."""
        if dummy and self.ordered:
            members = self.masked_embedding.members
            members.copy_(torch.arange(members.numel()).view_as(members))


def _check_target(config: Any, target: Any) -> None:
    text, backbone = config.text_config, config.backbone_hidden_size
    if getattr(target.config, "model_type", "") != "gemma4_text":
        raise ModelLoadError("a Gemma 4 assistant needs a Gemma 4 target.")
    if backbone != target.config.hidden_size:
        raise ModelLoadError(
            f"the assistant was trained for a target of hidden size {backbone}, "
            f"but this one has {target.config.hidden_size}."
        )
    if text.vocab_size != target.config.vocab_size:
        raise ModelLoadError(
            f"the assistant's vocabulary has {text.vocab_size} tokens, the target's "
            f"{target.config.vocab_size}."
        )


def _make_block(
    config: Any, index: int, layer_id: int, fmt: WeightFormat, target: Any
) -> DecoderLayer:
    """A decoder layer with the KV heads and the window of the target's layer that it reads."""
    kind = config.layer_types[index]
    source = source_layer(target, kind)
    block = DecoderLayer(config, index, layer_id, source.layer_id, fmt)
    if fmt.ranks is None and (ranks := target.format.ranks) is not None:
        # The cache has this rank's KV heads alone, so the ranks divide the queries as well.
        own = replace(fmt, ranks=ranks)
        block.self_attn = Attention(config, index, layer_id, source.layer_id, own)
    attention = block.self_attn
    if attention.head_dim != source.head_dim or attention.num_heads % source.num_kv_heads:
        raise ModelLoadError(
            f"layer {index} of the assistant has {attention.num_heads} heads of "
            f"{attention.head_dim}, but the target's {kind} cache has {source.num_kv_heads} of "
            f"{source.head_dim}."
        )
    attention.layer = replace(
        attention.layer, num_kv_heads=source.num_kv_heads, sliding_window=source.sliding_window
    )
    return block


def source_layer(target: Any, layer_type: str) -> AttentionLayer:
    """The target's last layer of this type that has a KV cache of its own."""
    types = target.config.layer_types
    for index in range(len(types) - 1, -1, -1):
        if types[index] == layer_type and kv_source(target.config, index) is None:
            layer: AttentionLayer = target.attention_layers()[index]
            return layer
    raise ModelLoadError(f"the target has no {layer_type} layer for the assistant to read.")
