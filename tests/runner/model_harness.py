"""Runs a served model step by step on the CPU, and the same tokens through transformers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from slipstream.configs.schema import ModelConfig
from slipstream.runner.attention.base import (
    AttentionBackend,
    AttentionState,
    BuilderSizes,
    CommonAttentionMetadata,
)
from slipstream.runner.attention.recurrent import RecurrentMetadata
from slipstream.runner.attention.reference import ReferenceBackend
from slipstream.runner.batch.kv_cache import KVCache, make_groups
from slipstream.runner.batch.recurrent_states import RecurrentStates
from slipstream.runner.loading.weights import load_weights, resolve_model
from slipstream.runner.models.base import TextModel
from slipstream.runner.models.formats.weight_format import WeightFormat, resolve_format
from slipstream.runner.models.registry import build_model

BLOCK_SIZE = 4
CPU = torch.device("cpu")


def load(
    folder: Path | str, dtype: str = "float32", packed: bool = False, **settings: Any
) -> TextModel:
    """Resolve, build and load a model as the worker does; `packed` as on a GPU."""
    resolved = resolve_model(ModelConfig(model=str(folder), dtype=dtype, **settings))
    fmt = resolve_format(dtype, CPU, resolved.checkpoint_dtype)
    packing = {"pack_fp16": fmt.pack_fp16, "native": fmt.native, "packed": packed}
    model = build_model(resolved.hf_config, WeightFormat(CPU, fmt.dtype, **packing))
    load_weights(model, resolved)
    return model


class Sequences:
    """The KV state of several requests over scattered pages, in place of a model runner."""

    def __init__(
        self,
        model: TextModel,
        num_reqs: int,
        max_len: int,
        block_size: int = BLOCK_SIZE,
        backend: AttentionBackend | None = None,
        log: int = 0,  # of recurrent states
    ):
        backend, dtype = backend or ReferenceBackend(), model.format.dtype
        self.model = model
        self.groups = make_groups(model.attention_layers())
        num_blocks = 1 + num_reqs * -(-max_len // block_size)
        self.cache = KVCache(self.groups, num_blocks, block_size, dtype, CPU)
        self.block_sizes = self.cache.block_sizes
        self.builders = [
            backend.create_builder(
                group.layers, BuilderSizes(size, num_reqs, 1024, max_len, dtype, CPU)
            )
            for group, size in zip(self.groups, self.block_sizes, strict=True)
        ]
        self.states: RecurrentStates | None = None
        if layers := getattr(model, "recurrent_layers", list)():  # draft heads have none
            self.states = RecurrentStates(layers, num_reqs, log, dtype, CPU)
        self.lengths = [0] * num_reqs
        self.tables = []
        for index, count in enumerate(self.cache.block_counts):
            order = list(range(1, count))
            random.Random(index).shuffle(order)
            self.tables.append(torch.tensor(order, dtype=torch.int32).view(num_reqs, -1))

    def attention(
        self, reqs: Sequence[int], counts: Sequence[int]
    ) -> tuple[AttentionState, Tensor]:
        """State of a step with `counts` tokens of each request in `reqs`, and their positions."""
        starts = [self.lengths[req] for req in reqs]
        row_pos = [torch.arange(s, s + n) for s, n in zip(starts, counts, strict=True)]
        positions = torch.cat(row_pos)
        loc = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        seq_lens = torch.tensor([s + n for s, n in zip(starts, counts, strict=True)]).int()
        metadata = []
        groups = zip(self.tables, self.builders, self.block_sizes, strict=True)
        for table, builder, size in groups:
            rows = table[list(reqs)]
            slots = torch.cat(
                [
                    row[pos // size].long() * size + pos % size
                    for row, pos in zip(rows, row_pos, strict=True)
                ]
            )
            common = CommonAttentionMetadata(
                len(reqs),
                len(positions),
                max(counts),
                int(seq_lens.max()),
                loc,
                loc,
                seq_lens,
                seq_lens,
                rows,
                slots,
            )
            metadata.append(builder.build(common))
        return self.cache.attention_state(
            metadata, self._recurrent(reqs, loc, positions)
        ), positions

    def _recurrent(
        self, reqs: Sequence[int], loc: Tensor, positions: Tensor
    ) -> RecurrentMetadata | None:
        if self.states is None:
            return None
        buffers = SimpleNamespace(
            idx_mapping=torch.tensor(list(reqs), dtype=torch.int32),
            query_start_loc=loc,
            positions=positions,
            max_num_reqs=len(reqs),
        )
        return self.states.builder.build(buffers, len(reqs), len(positions), loc, False)

    def step(
        self, rows: Sequence[tuple[int, Sequence[int]]], aux_boundaries: tuple[int, ...] = ()
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Compute (request, new ids) rows: logits per row [n, V], aux states per boundary."""
        reqs, counts = [req for req, _ in rows], [len(ids) for _, ids in rows]
        attention, positions = self.attention(reqs, counts)
        ids = torch.tensor([token for _, row in rows for token in row], dtype=torch.int32)
        with torch.inference_mode():
            hidden, taps = self.model(ids, positions, attention, aux_boundaries)
            logits = self.model.compute_logits(hidden)
        for req, count in zip(reqs, counts, strict=True):
            self.lengths[req] += count
        aux = [] if taps is None else list(taps.split(hidden.shape[1], dim=1))
        return list(logits.split(counts)), aux


def assert_equals_transformers(
    model: TextModel,
    oracle: Any,
    tolerance: float = 1e-4,
    log: int = 0,
    block_size: int = BLOCK_SIZE,
) -> None:
    """Prefill, chunks, ragged batches, verify-like rows and decode give the oracle's logits."""
    vocab = model.config.vocab_size
    generator = torch.Generator().manual_seed(5)
    lengths = (23, 9, 17, 2)
    prompts = [torch.randint(0, vocab, (n,), generator=generator).tolist() for n in lengths]
    with torch.no_grad():
        expected = [oracle(torch.tensor([prompt])).logits[0] for prompt in prompts]
    # (request, first token, tokens) of each step
    steps = [
        [(0, 0, 23)],  # prefill alone
        [(1, 0, 5), (2, 0, 7)],  # first chunks of two
        [(3, 0, 1), (2, 7, 6), (1, 5, 1)],  # chunks of unequal length and a decode
        [(1, 6, 1), (2, 13, 1), (3, 1, 1)],  # a decode batch of ragged lengths
        [(1, 7, 2), (2, 14, 2)],  # two tokens each, as in verification
        [(2, 16, 1)],
    ]
    sequences = Sequences(model, len(prompts), 32, block_size, log=log)
    got: list[list[Tensor]] = [[] for _ in prompts]
    for step in steps:
        rows = [(req, prompts[req][start : start + count]) for req, start, count in step]
        for (req, _, _), logits in zip(step, sequences.step(rows)[0], strict=True):
            got[req].append(logits)
    for prompt_logits, reference in zip(got, expected, strict=True):
        torch.testing.assert_close(
            torch.cat(prompt_logits), reference.float(), atol=tolerance, rtol=tolerance
        )
