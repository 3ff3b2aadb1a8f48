"""The base of every decoder model: embedding, output head, and the mapping of its checkpoint."""

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
from ..attention.recurrent import RecurrentLayer
from ..attention.reference import ReferenceMetadata
from .formats.row_decoder import RowDecoder
from .layers import CheckpointSlot, Embedding, RMSNorm, WeightFormat, module_slots
from .native import NativeDecoder
from .rotary import RotaryEmbedding, RotaryStep
from .sharded import head, table

# Tables stored in old checkpoints, which every implementation recomputes.
_RECOMPUTED = re.compile(r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$|\.attn\.masked_bias$")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")

# Final hidden states [M, H], and auxiliary hidden states concatenated [M, count * H], or None.
ForwardOutput = tuple[Tensor, Tensor | None]


def is_after_layers(name: str, num_layers: int) -> bool:
    """Whether a stored tensor is of a layer after the model's: a multi-token prediction module."""
    layer = _LAYER.match(name)
    return layer is not None and int(layer.group(1)) >= num_layers


class AuxHiddenStates:
    """Collects auxiliary hidden states: the residual stream at some boundaries, concatenated."""

    def __init__(self, boundaries: Sequence[int], like: Tensor, into: ForwardOutput | None) -> None:
        """`like` is a stream [M, H]. They are written into the second tensor of `into` if given."""
        self._size, self._column = like.shape[1], {b: i for i, b in enumerate(boundaries)}
        self.all: Tensor | None = None if into is None else into[1]
        if self.all is None and boundaries:
            self.all = like.new_empty(like.shape[0], len(boundaries) * self._size)

    def keep(self, boundary: int, hidden: Tensor, residual: Tensor | None = None) -> None:
        """Keep hidden + residual if `boundary` is wanted; shapes as in `kernels.linear.streams`."""
        column = self._column.get(boundary)
        if column is not None:
            assert self.all is not None
            own = self.all.narrow(1, column * self._size, self._size)
            write_stream(hidden, residual, own)


# Rows [M, H] and None; or an embedding table [V, H] and the ids [M] to look up in it.
EmbeddedIds = tuple[Tensor, Tensor | None]


def embedded(model: Any, input_ids: Tensor) -> EmbeddedIds:
    """The embeddings of `input_ids`, as a table and ids if possible; `streams.norm_pair` reads
    both."""
    if getattr(type(model), "embed", None) is TextModel.embed:
        return embedded_by(model.embed_tokens, input_ids)
    return model.embed(input_ids), None


def embedded_by(rows: Embedding, input_ids: Tensor) -> EmbeddedIds:
    """The same for a table alone."""
    if rows.weight is None or not rows.whole:
        return rows.forward(input_ids), None
    return rows.weight, input_ids


class TextModel(nn.Module):
    """A decoder over flat token rows. Subclasses set `blocks` and implement `forward`."""

    blocks: Any  # the decoder layers, in order

    def __init__(self, config: Any, fmt: WeightFormat) -> None:
        super().__init__()
        self.config = config
        self.format = fmt
        self.embed_tokens = table(config.vocab_size, config.hidden_size, fmt)
        self.tied = bool(config.tie_word_embeddings)
        self.lm_head = head(config.hidden_size, config.vocab_size, fmt)
        if self.tied and (fmt.native or fmt.packed):
            self.embed_tokens.heads.append(self.lm_head)
        elif self.tied and not fmt.pack_fp16:
            self.lm_head.weight = self.embed_tokens.weight  # one shared tensor

    @abstractmethod
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        attention: AttentionState,
        aux_boundaries: tuple[int, ...] = (),
        into: ForwardOutput | None = None,
    ) -> ForwardOutput:
        """Compute hidden states after the final norm, and the residual stream at some boundaries.

        input_ids: [M] int32; positions: [M] int64; `aux_boundaries` in ascending order, where
        boundary b is the stream after b layers (0 = the embeddings). Returns [M, H], and the
        streams concatenated [M, boundaries * H] (None without any), in the tensors of `into` if
        given.
        """

    def attention_layers(self) -> list[AttentionLayer]:
        """The constants of every attention layer, in order."""
        return [block.self_attn.layer for block in self.blocks]

    def recurrent_layers(self) -> list[RecurrentLayer]:
        """The constants of every recurrent layer, in order; most models have none."""
        return []

    def embed(self, input_ids: Tensor) -> Tensor:
        """input_ids [M] -> [M, H], the input of the first layer."""
        out: Tensor = self.embed_tokens.forward(input_ids)
        return out

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """hidden [L, H] after the final norm -> [L, V]."""
        return self.lm_head.forward(hidden)

    @property
    def pick_tokens(self) -> Callable[..., tuple[Tensor, Tensor]] | None:
        """A function that chooses tokens without writing logits, like `head_sample.sample_head`.

        It maps (hidden [L, H], vocabulary size = all, draws = None) to (tokens [L], largest logits
        [L]). None if torch computes the head, or if logits are more than a matrix product.
        """
        if not self.lm_head.can_pick:
            return None
        plain = type(self).compute_logits is TextModel.compute_logits
        return self.lm_head.pick if plain else None

    def checkpoint_slots(self) -> dict[str, CheckpointSlot]:
        """The slots to load, by name in the checkpoint."""
        slots = {
            name if name.startswith("lm_head.") else f"model.{name}": slot
            for name, slot in module_slots(self).items()
        }
        if self.tied:
            own_head = slots.pop("lm_head.weight")
            own_table = slots["model.embed_tokens.weight"]
            if self.format.pack_fp16:
                slots["model.embed_tokens.weight"] = replace(
                    own_table, load=_load_both(own_table.load, own_head.load)
                )
            # some checkpoints store the tied head as well
            slots["lm_head.weight"] = replace(own_head, load=lambda tensor: None, optional=True)
        return slots

    def checkpoint_name(self, name: str) -> str | None:
        """The slot's name for a stored tensor; None if the tensor is known but not needed."""
        return None if _RECOMPUTED.search(name) else name


class Block(Protocol):
    """A pre-norm decoder layer. Its stream is the sum of the two tensors [M, H] that it returns.

    The first may be S partial sums [S, M, H], and the second may be None (see
    `streams.write_stream`).
    """

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        rotary: RotaryStep,
        attention: AttentionState,
    ) -> tuple[Tensor, Tensor | None]: ...


class SkippedBlock:
    skips = True

    def forward(
        self,
        hidden: Tensor,
        residual: Tensor | None,
        rotary: RotaryStep,
        attention: AttentionState,
    ) -> tuple[Tensor, Tensor | None]:
        return hidden, residual


class BlockModel(TextModel):
    """A model that runs `_blocks` one after the other. `short_model` leaves some of them out."""

    _blocks: list[Any]
    skipped: Any  # takes the place of a block that is left out


class PreNormModel(BlockModel):
    """A model of pre-norm blocks that share one rotary embedding, with a final norm."""

    skipped = SkippedBlock()

    def __init__(
        self, config: Any, fmt: WeightFormat, blocks: Sequence[Block], rotary: RotaryEmbedding
    ) -> None:
        super().__init__(config, fmt)
        self._blocks = list(blocks)
        self.layers = nn.ModuleList(block for block in blocks if isinstance(block, nn.Module))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, fmt)
        self.rotary = rotary
        self.decoder: NativeDecoder | None = None  # runs the blocks where it can
        self.row_decoder: RowDecoder | None = None  # the same for few rows on a GPU

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
        aux = AuxHiddenStates(aux_boundaries, hidden, into)
        if self.decoder is not None and self.decoder.runs(attention):
            self.decoder.run(hidden, positions, attention, aux_boundaries, aux.keep)
        else:
            rotary = self.rotary.at(positions)
            by_row = self.row_decoder
            if by_row is not None and rotary.cos is None and by_row.runs(self._blocks, hidden):
                hidden = by_row.run(self._blocks, hidden, rotary, attention, aux.keep)
            else:
                for index, block in enumerate(self._blocks):
                    aux.keep(index, hidden, residual)
                    hidden, residual = block.forward(hidden, residual, rotary, attention)
                aux.keep(len(self._blocks), hidden, residual)
        out = None if into is None else into[0]
        return self.norm.add(hidden, residual, out=out)[0], aux.all


def has_native_head(model: Any) -> bool:
    """Whether native code alone computes a model's logits."""
    plain = getattr(type(model), "compute_logits", None) is TextModel.compute_logits
    return plain and model.lm_head.matrix is not None


def run_alone(
    model: Any,
    input_ids: Tensor,
    positions: Tensor,
    attention: AttentionState,
    aux_boundaries: tuple[int, ...] = (),
) -> ForwardOutput:
    """`TextModel.forward` of rows [M] on a CPU, in which no row's bits depend on another row.

    Native layers compute every row alone. Torch chooses kernels by the number of rows, so where a
    model needs torch, it runs one row at a time.
    """
    decoder = getattr(model, "decoder", None)
    if decoder is not None and decoder.runs(attention):
        result: ForwardOutput = model(input_ids, positions, attention, aux_boundaries)
        return result
    states = []
    for group in attention.metadata:
        assert group is None or isinstance(group, ReferenceMetadata)
        states.append([None] * len(input_ids) if group is None else group.rows())
    outputs = []
    for row in range(len(input_ids)):
        own: Any = [group[row] for group in states]
        ids, place = input_ids[row : row + 1].clone(), positions[row : row + 1].clone()
        outputs.append(model(ids, place, replace(attention, metadata=own), aux_boundaries))
    aux = [output[1] for output in outputs if output[1] is not None]
    return torch.cat([output[0] for output in outputs]), torch.cat(aux) if aux else None


def _load_both(
    first: Callable[[Tensor], None], second: Callable[[Tensor], None]
) -> Callable[[Tensor], None]:
    def load(tensor: Tensor) -> None:
        first(tensor)
        second(tensor)

    return load
