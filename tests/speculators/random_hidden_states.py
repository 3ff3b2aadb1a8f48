"""A replacement for a target: the trainer reads fixed functions of the token ids."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from slipstream.speculators.training.dataset import TrainingSequence
from slipstream.speculators.training.head import HeadGeometry
from slipstream.speculators.training.objective import Batch

GEOMETRY = HeadGeometry(
    hidden_size=32,
    intermediate_size=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    vocab_size=61,
    draft_vocab_size=24,
    taps=(2, 4, 5),
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    max_position_embeddings=128,
)


class RandomTarget:
    """Tables of random rows; no attention, so a position depends on its own token alone."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        vocab, hidden = GEOMETRY.vocab_size, GEOMETRY.hidden_size
        self.embeddings = torch.randn(vocab, hidden, generator=generator)
        self.taps = torch.randn(vocab, 3 * hidden, generator=generator)
        self.logits = torch.randn(vocab, vocab, generator=generator) * 3

    def continuation(self, token: int, count: int) -> list[int]:
        """The greedy continuation of `token`."""
        out: list[int] = []
        for _ in range(count):
            token = int(self.logits[token].argmax())
            out.append(token)
        return out

    def read(self, sequences: Sequence[TrainingSequence], draft_ids: Tensor) -> Batch:
        """As `HiddenSource.read`."""
        lengths = [len(sequence.token_ids) for sequence in sequences]
        ids = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
        for row, sequence in enumerate(sequences):
            ids[row, : lengths[row]] = torch.tensor(sequence.token_ids)
        return Batch(
            self.taps[ids],
            self.embeddings[ids],
            self.logits[ids][..., draft_ids],
            self.logits[ids].argmax(-1),
            ids,
            torch.tensor(lengths),
            torch.tensor([sequence.prompt_length for sequence in sequences]),
        )


def random_sequences(count: int, seed: int = 0) -> list[TrainingSequence]:
    """Sequences of random tokens and lengths."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for _ in range(count):
        length = int(torch.randint(6, 20, (1,), generator=generator))
        ids = torch.randint(GEOMETRY.vocab_size, (length,), generator=generator)
        sequences.append(TrainingSequence(tuple(ids.tolist()), 3))
    return sequences
