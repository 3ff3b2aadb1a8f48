"""Reads what training needs from the target: auxiliary hidden states, logits and embeddings.

Nothing is stored. For each batch that the trainer requests, the target runs over its sequences in
the KV blocks of the engine that generated them; the next batch overwrites them. The engine must be
idle.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...configs.schema import Config
from ...speculators.training.dataset import TrainingSequence
from ...speculators.training.head import HeadGeometry, check_taps
from ...speculators.training.objective import Batch
from ..attention.base import AttentionState, CommonAttentionMetadata
from ..batch.host_copy import StagingPool
from ..engine.engine import Engine, join
from ..errors import RunnerError
from ..models.rotary import rope_parameters
from ..startup.assembly import ProgressFn, assemble
from ..step.model_runner import ModelRunner
from ..step.parts import RunnerParts

_LOGIT_ROWS = 2048  # positions for which logits of the whole vocabulary are computed at once


@dataclass(frozen=True)
class _Piece:
    """Consecutive tokens of one sequence, run in one forward pass."""

    row: int  # row of the batch
    start: int
    count: int


class TargetReader:
    """Implements `speculators.training.dataset.HiddenSource` with an engine's model and KV
    memory."""

    def __init__(self, parts: RunnerParts, taps: tuple[int, ...]) -> None:
        self._target = parts.target
        self._model = cast(Any, parts.target.model)
        if (streams := getattr(self._model.config, "hc_mult", 1)) > 1:
            raise RunnerError(
                f"EAGLE-3 heads read one residual stream, but this target has {streams}: train on "
                "another model"
            )
        self._taps = taps
        self._max_tokens = parts.facts.limits.max_num_batched_tokens
        self._max_reqs = parts.facts.limits.max_num_seqs
        cache = parts.target.cache
        self._block_size = cache.block_size
        self._num_blocks = cache.num_blocks
        self._device: torch.device = next(iter(cache.kv_caches.values())).device
        # Pinned buffers, so that uploading a pass's arrays does not wait for the previous pass.
        self._staging = StagingPool(self._device)
        check_taps(taps, int(self._model.config.num_hidden_layers))

    @property
    def max_sequence_tokens(self) -> int:
        """Length of the longest sequence that fits into the KV cache."""
        return (self._num_blocks - 1) * self._block_size

    def read(self, sequences: Sequence[TrainingSequence], draft_ids: Tensor) -> Batch:
        """Run the target over the sequences, padded with zeros to the longest.

        The batch has logits only for the tokens `draft_ids`, [D] int64, but its `target_ids` are
        the likeliest of the whole vocabulary. Its tensors are on the device. Raises RunnerError if
        a sequence does not fit into the KV cache.
        """
        lengths = [len(sequence.token_ids) for sequence in sequences]
        rows, longest = len(lengths), max(lengths)
        hidden_size = int(self._model.config.hidden_size)
        ids = np.zeros((rows, longest), dtype=np.int64)
        for row, sequence in enumerate(sequences):
            ids[row, : lengths[row]] = sequence.token_ids
        dtype = self._model.format.dtype

        def zeros(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=self._device)

        batch = Batch(
            taps=zeros(rows, longest, len(self._taps) * hidden_size),
            embeddings=zeros(rows, longest, hidden_size),
            draft_logits=zeros(rows, longest, int(draft_ids.shape[0])),
            target_ids=zeros(rows, longest, kind=torch.int64),
            token_ids=self._staging.upload(ids),
            lengths=self._staging.upload(np.array(lengths)),
            prompt_lengths=self._staging.upload(np.array([s.prompt_length for s in sequences])),
        )
        with torch.inference_mode():
            for group in self._groups_that_fit(lengths):
                for pieces in self._passes(group, lengths):
                    self._run(pieces, self._first_blocks(group, lengths), ids, batch, draft_ids)
        return batch

    def starting_head(self, draft_ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """The target's output head for `draft_ids`, [D, H], and the weight of its final norm, [H].

        The rows are computed by applying the head to unit vectors, since its weights may be packed.
        The norm is None if the target has none that a head can start from.
        """
        size = int(self._model.config.hidden_size)
        unit = torch.eye(size, dtype=self._model.format.dtype, device=self._device)
        with torch.inference_mode():
            columns = [
                self._model.compute_logits(rows)[:, draft_ids.to(self._device)].float()
                for rows in torch.split(unit, 256)
            ]
            norm = getattr(self._model, "norm", None)
            weight = norm.weight.float() if norm is not None and not norm.offset else None
        rows = torch.cat(columns).T.contiguous()
        return rows.clone(), None if weight is None else weight.clone()

    # --- a pass -----------------------------------------------------------------------------------

    def _blocks(self, length: int) -> int:
        return -(-length // self._block_size)

    def _groups_that_fit(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Split the batch into groups of rows that fit into the KV cache together."""
        group: list[int] = []
        free = self._num_blocks - 1
        for row, length in enumerate(lengths):
            need = self._blocks(length)
            if group and (need > free or len(group) == self._max_reqs):
                yield group
                group, free = [], self._num_blocks - 1
            if need > free:
                raise RunnerError(f"a sequence of {length} tokens does not fit into the KV cache")
            group.append(row)
            free -= need
        yield group

    def _passes(self, group: Sequence[int], lengths: Sequence[int]) -> Iterator[list[_Piece]]:
        """Cut a group's sequences into passes of at most the runner's tokens per step."""
        pieces: list[_Piece] = []
        room = self._max_tokens
        for row in group:
            start = 0
            while start < lengths[row]:
                if room == 0:
                    yield pieces
                    pieces, room = [], self._max_tokens
                count = min(room, lengths[row] - start)
                pieces.append(_Piece(row, start, count))
                start, room = start + count, room - count
        yield pieces

    def _first_blocks(self, group: Sequence[int], lengths: Sequence[int]) -> dict[int, int]:
        """Give each sequence of the group its own consecutive blocks; returns row -> first
        block."""
        first_blocks, next_block = {}, 1
        for row in group:
            first_blocks[row] = next_block
            next_block += self._blocks(lengths[row])
        return first_blocks

    def _run(
        self,
        pieces: Sequence[_Piece],
        first_blocks: Mapping[int, int],
        ids: NDArray[np.int64],  # [B, T]
        batch: Batch,
        draft_ids: Tensor,
    ) -> None:
        at = np.concatenate([np.arange(p.start, p.start + p.count) for p in pieces])
        row_of = np.repeat([p.row for p in pieces], [p.count for p in pieces])  # [M]
        input_ids = self._staging.upload(ids[row_of, at].astype(np.int32))
        positions, rows = self._staging.upload(at), self._staging.upload(row_of)
        state = self._attention(pieces, first_blocks, at, row_of)
        hidden, taps = self._model(input_ids, positions, state, self._taps)
        batch.taps[rows, positions] = taps
        batch.embeddings[rows, positions] = self._model.embed(input_ids)
        for start in range(0, len(row_of), _LOGIT_ROWS):
            part = slice(start, start + _LOGIT_ROWS)
            logits = self._model.compute_logits(hidden[part])
            batch.draft_logits[rows[part], positions[part]] = logits[:, draft_ids].to(
                batch.draft_logits.dtype
            )
            batch.target_ids[rows[part], positions[part]] = logits.argmax(dim=-1)

    def _attention(
        self,
        pieces: Sequence[_Piece],
        first_blocks: Mapping[int, int],
        at: NDArray[np.int64],  # [M] positions
        row_of: NDArray[np.int64],  # [M]
    ) -> AttentionState:
        upload = self._staging.upload
        widest = max(self._blocks(p.start + p.count) for p in pieces)
        firsts = np.array([first_blocks[p.row] for p in pieces], dtype=np.int32)
        table = firsts[:, None] + np.arange(widest, dtype=np.int32)
        table = table.clip(max=self._num_blocks - 1)  # columns after a sequence's end are not read
        first_of_row = np.zeros(max(first_blocks) + 1, dtype=np.int64)
        first_of_row[list(first_blocks)] = list(first_blocks.values())
        counts = np.array([0, *(p.count for p in pieces)], dtype=np.int32)
        starts = counts.cumsum(dtype=np.int32)
        seq_lens = np.array([p.start + p.count for p in pieces], dtype=np.int32)
        common = CommonAttentionMetadata(
            num_reqs=len(pieces),
            num_actual_tokens=int(starts[-1]),
            max_query_len=int(counts.max()),
            max_seq_len=int(seq_lens.max()),
            query_start_loc=upload(starts),
            query_start_loc_cpu=torch.from_numpy(starts),
            seq_lens=upload(seq_lens),
            seq_lens_cpu_upper_bound=torch.from_numpy(seq_lens),
            block_table=upload(table),
            slot_mapping=upload(first_of_row[row_of] * self._block_size + at),
        )
        metadata = [builder.build(common) for builder in self._target.builders]
        return self._target.cache.attention_state(metadata)


@dataclass(frozen=True)
class TrainingEngine:
    """An engine that generates replies, and the parts that a `TargetReader` uses as well.

    While the reader runs, the engine must be idle: the reader overwrites its KV blocks.
    """

    engine: Engine
    parts: RunnerParts

    @property
    def target_config(self) -> Any:
        model: Any = self.parts.target.model
        return model.config


def build_training_engine(config: Config, progress: ProgressFn) -> TrainingEngine:
    """Load the target without a drafter, and warm it up."""
    parts = assemble(config, progress)
    runner = ModelRunner(parts)
    runner.warm_up()
    runner.capture()
    return TrainingEngine(join(runner, config), parts)


def head_geometry(
    target: Any,  # the target's config
    draft_vocab_size: int | None,
    intermediate_size: int | None,
    taps: tuple[int, ...],
    max_position_embeddings: int,
) -> HeadGeometry:
    """The shape of a head with the target's width and number of heads.

    Raises RunnerError for targets without standard attention, such as MLA.
    """
    heads = getattr(target, "num_attention_heads", None)
    inner = intermediate_size or getattr(target, "intermediate_size", None)
    if heads is None or inner is None or getattr(target, "kv_lora_rank", None) is not None:
        raise RunnerError(
            f"heads cannot be trained for targets of type {getattr(target, 'model_type', '?')}"
        )
    hidden = int(target.hidden_size)
    head_dim = getattr(target, "head_dim", None) or hidden // heads
    vocab_size = int(target.vocab_size)
    # Plain rotary embedding: the head is trained from scratch and needs none of the target's
    # scaling.
    theta = float(rope_parameters(target).get("rope_theta") or 10000.0)
    return HeadGeometry(
        hidden_size=hidden,
        intermediate_size=int(inner),
        num_heads=int(heads),
        num_kv_heads=int(getattr(target, "num_key_value_heads", None) or heads),
        head_dim=int(head_dim),
        vocab_size=vocab_size,
        draft_vocab_size=min(draft_vocab_size or 32000, vocab_size),
        taps=taps,
        rms_norm_eps=float(getattr(target, "rms_norm_eps", 1e-6)),
        rope_theta=theta,
        max_position_embeddings=max_position_embeddings,
    )
