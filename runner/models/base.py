"""What every decoder model has: embedding, head, attention layers, map of its checkpoint."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...kernels.linear.streams import write_stream
from ..attention.base import AttentionLayer, AttentionState
from .layers import CheckpointSlot, Embedding, Linear, RMSNorm, WeightFormat, module_slots
from .rotary import RotaryEmbedding, RotaryStep

# Tables that old checkpoints carry and every implementation recomputes.
_RECOMPUTED = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$|\.attn\.masked_bias$")


# A pass's hidden states [M, H] and taps side by side [M, taps * H]; no taps, None.
ForwardOutput = tuple[Tensor, Tensor | None]


class Taps:
    """Keeps the residual stream of a pass at some boundaries, side by side."""

    def __init__(self, boundaries: Sequence[int], like: Tensor, into: ForwardOutput | None) -> None:
        """`like`: a stream [M, H]; kept in `into`, if there is such a thing."""
        self._size, self._column = like.shape[1], {b: i for i, b in enumerate(boundaries)}
        self.all: Tensor | None = None if into is None else into[1]
        if self.all is None and boundaries:
            self.all = like.new_empty(like.shape[0], len(boundaries) * self._size)

    def keep(self, boundary: int, hidden: Tensor, residual: Tensor | None = None) -> None:
        """Keep hidden + residual if it is asked for; shapes as in `kernels.linear.streams`."""
        column = self._column.get(boundary)
        if column is not None:
            assert self.all is not None
            own = self.all.narrow(1, column * self._size, self._size)
            write_stream(hidden, residual, own)


# Rows [M, H], and None; or the table [V, H] and the ids [M] by which they are found in it.
EmbeddedIds = tuple[Tensor, Tensor | None]


def embedded(model: Any, input_ids: Tensor) -> EmbeddedIds:
    """What `model` embeds `input_ids` as: for `streams.norm_pair`, which reads tables itself."""
    if getattr(type(model), "embed", None) is TextModel.embed:
        return model.embed_tokens.weight, input_ids
    return model.embed(input_ids), None


class TextModel(nn.Module):
    """A decoder over flat token rows. Subclasses fill `layers` and give `forward`."""

    def __init__(self, config: Any, fmt: WeightFormat) -> None:
        super().__init__()
        self.config = config
        self.format = fmt
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, fmt)
        self.tied = bool(config.tie_word_embeddings)
        self.lm_head = Linear(config.hidden_size, config.vocab_size, fmt, role="head")
        if self.tied and not fmt.pack_fp16:
            self.lm_head.weight = self.embed_tokens.weight  # one tensor, two uses

    @abstractmethod
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: AttentionState,
        aux_boundaries: tuple[int, ...] = (),
        into: ForwardOutput | None = None,
    ) -> ForwardOutput:
        """Hidden states after the final norm, and the residual stream at each boundary asked for.

        input_ids: [M] int32; positions: [M] int64; boundary b is the stream after b layers (0 = the
        embeddings), in ascending order. Returns [M, H] and the streams side by side, in the tensors
        of `into` if it is given.
        """

    @abstractmethod
    def attention_layers(self) -> list[AttentionLayer]:
        """Constants of every attention layer, in order."""

    def embed(self, input_ids: Tensor) -> Tensor:
        """input_ids [M] -> [M, H], as the first layer takes them."""
        out: Tensor = self.embed_tokens.forward(input_ids)
        return out

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [L, H] after the final norm -> [L, V]."""
        return self.lm_head.forward(hidden)

    @property
    def pick_tokens(self) -> Callable[..., tuple[Tensor, Tensor]] | None:
        """(hidden [L, H], vocabulary = all, draws = None) -> tokens and largest logits of rows, as
        `head_sample.sample_head`; None where logits are more than a product, or torch's."""
        if self.lm_head.chooser is None:
            return None
        plain = type(self).compute_logits is TextModel.compute_logits
        return self.lm_head.pick if plain else None

    def checkpoint_slots(self) -> dict[str, CheckpointSlot]:
        """Checkpoint name -> where the tensor goes."""
        slots = {
            name if name.startswith("lm_head.") else f"model.{name}": slot
            for name, slot in module_slots(self).items()
        }
        if self.tied:
            head = slots.pop("lm_head.weight")
            table = slots["model.embed_tokens.weight"]
            if self.format.pack_fp16:
                slots["model.embed_tokens.weight"] = replace(
                    table, load=_load_both(table.load, head.load)
                )
            # some checkpoints store the tied head as well
            slots["lm_head.weight"] = replace(head, load=_load_nothing, optional=True)
        return slots

    def checkpoint_name(self, name: str) -> str | None:
        """The slot a stored tensor belongs to; None = known and not needed."""
        return None if _RECOMPUTED.search(name) else name


class Block(Protocol):
    """A pre-norm decoder layer; its stream is the sum of the two tensors [M, H] it passes on. The
    first may be in parts [S, M, H], the second missing (see `streams.write_stream`)."""

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        rotary: RotaryStep,
        attention: AttentionState,
    ) -> tuple[Tensor, Tensor | None]: ...


class PreNormModel(TextModel):
    """Pre-norm blocks with one rotary embedding, then a final norm."""

    def __init__(
        self, config: Any, fmt: WeightFormat, blocks: Sequence[Block], rotary: RotaryEmbedding
    ) -> None:
        super().__init__(config, fmt)
        self._blocks = list(blocks)
        self.layers = nn.ModuleList(block for block in blocks if isinstance(block, nn.Module))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, fmt)
        self.rotary = rotary

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: AttentionState,
        aux_boundaries: tuple[int, ...] = (),
        into: ForwardOutput | None = None,
    ) -> ForwardOutput:
        hidden: Tensor = self.embed(input_ids)
        residual: Tensor | None = None
        rotary = self.rotary.at(positions)
        taps = Taps(aux_boundaries, hidden, into)
        for index, block in enumerate(self._blocks):
            taps.keep(index, hidden, residual)
            hidden, residual = block.forward(hidden, residual, rotary, attention)
        taps.keep(len(self._blocks), hidden, residual)
        out = None if into is None else into[0]
        return self.norm.add(hidden, residual, out=out)[0], taps.all


def _load_both(
    first: Callable[[Tensor], None], second: Callable[[Tensor], None]
) -> Callable[[Tensor], None]:
    def load(tensor: Tensor) -> None:
        first(tensor)
        second(tensor)

    return load


def _load_nothing(tensor: torch.Tensor) -> None:
    pass
