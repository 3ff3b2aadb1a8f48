"""The draft vocabulary: the target's most frequent tokens, and the maps between both id spaces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftVocabulary:
    """The target tokens that a head can draft. Draft ids have the order of target ids."""

    target_ids: Tensor  # [D] int64, ascending: draft id -> target id
    vocab_size: int  # V
    coverage: float = 1.0  # fraction of the counted tokens that have a draft id

    @property
    def size(self) -> int:
        return int(self.target_ids.shape[0])

    @property
    def is_whole(self) -> bool:
        """True if every target token has a draft id, so that no maps are needed."""
        return self.size == self.vocab_size

    def d2t(self) -> Tensor:
        """The offsets [D] int64 that checkpoints store: target id = draft id + offset."""
        return self.target_ids - torch.arange(self.size)

    def t2d(self) -> Tensor:
        """[V] bool, true for tokens with a draft id."""
        has_draft_id = torch.zeros(self.vocab_size, dtype=torch.bool)
        has_draft_id[self.target_ids] = True
        return has_draft_id


def count_tokens(texts: Iterable[Sequence[int]], vocab_size: int) -> Tensor:
    """Count how often each token occurs; [V] int64."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for ids in texts:
        counts += torch.bincount(torch.tensor(ids, dtype=torch.int64), minlength=vocab_size)
    return counts


def choose_draft_vocabulary(counts: Tensor, size: int) -> DraftVocabulary:
    """Choose the `size` tokens with the highest `counts`, [V].

    Among equal counts, lower ids win, because tokenizers give frequent pieces low ids. Raises
    ValueError if `size` is not in 1 .. V.
    """
    vocab_size = int(counts.shape[0])
    if not 0 < size <= vocab_size:
        raise ValueError(f"a draft vocabulary of {size} tokens does not fit into {vocab_size}.")
    order = torch.sort(counts, descending=True, stable=True).indices
    chosen = order[:size].sort().values
    total = int(counts.sum())
    coverage = int(counts[chosen].sum()) / total if total else 1.0
    return DraftVocabulary(chosen, vocab_size, coverage)
