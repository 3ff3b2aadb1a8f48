"""Training sequences, and the order of batches, which depends only on seed and batch number."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .objective import Batch

_WINDOW = 16  # sequences of this many batches are sorted by length, which keeps padding small


@dataclass(frozen=True)
class TrainingSequence:
    """A prompt and the target's reply to it."""

    token_ids: tuple[int, ...]
    prompt_length: int
    domain: str = ""


class HiddenSource(Protocol):
    """Runs the target over sequences. Its results are used once and not kept."""

    def read(self, sequences: Sequence[TrainingSequence], draft_ids: Tensor) -> Batch:
        """Compute auxiliary hidden states, embeddings and logits of every position.

        Logits are kept for `draft_ids`, [D] int64.
        """


class BatchOrder:
    """Decides which sequences are in batch n of an endless run, shuffled again in each epoch."""

    def __init__(self, lengths: Sequence[int], batch_tokens: int, seed: int) -> None:
        self._lengths = list(lengths)
        self._batch_tokens = batch_tokens
        self._seed = seed
        self._epoch = -1
        self._batches: list[list[int]] = []
        self._starts = [0]  # the first batch of each epoch known so far

    def batch(self, number: int) -> list[int]:
        """The indices of the sequences in batch `number`, counted from 0."""
        while number >= self._starts[-1]:
            self._load(len(self._starts) - 1)
            self._starts.append(self._starts[-1] + len(self._batches))
        epoch = next(e for e in range(len(self._starts) - 1) if number < self._starts[e + 1])
        self._load(epoch)
        return self._batches[number - self._starts[epoch]]

    def num_batches(self, epochs: int) -> int:
        """The number of batches in `epochs` epochs."""
        while len(self._starts) <= epochs:
            self.batch(self._starts[-1])
        return self._starts[epochs]

    def _load(self, epoch: int) -> None:
        if epoch == self._epoch:
            return
        self._epoch = epoch
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
        order = torch.randperm(len(self._lengths), generator=generator).tolist()
        mean = sum(self._lengths) / len(self._lengths)
        window = max(1, int(_WINDOW * self._batch_tokens / mean))
        groups: list[list[int]] = []
        for start in range(0, len(order), window):
            near = sorted(order[start : start + window], key=self._lengths.__getitem__)
            groups += pack(near, self._lengths, self._batch_tokens)
        shuffled = torch.randperm(len(groups), generator=generator).tolist()
        self._batches = [groups[i] for i in shuffled]


def pack(order: Sequence[int], lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Cut `order` into batches of at most `batch_tokens` tokens including padding.

    A longer sequence is a batch of its own.
    """
    batches: list[list[int]] = []
    longest = 0
    for index in order:
        longest = max(longest, lengths[index])
        if not batches or longest * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
            longest = lengths[index]
        batches[-1].append(index)
    return batches


def digest(sequences: Sequence[TrainingSequence]) -> str:
    """A hash that identifies a data set."""
    found = hashlib.sha256()
    for sequence in sequences:
        ids = torch.tensor([sequence.prompt_length, *sequence.token_ids], dtype=torch.int32)
        found.update(ids.numpy().tobytes())
    return found.hexdigest()[:16]
