"""The memory in which the programs of `multiply_row` meet and exchange rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MOST_PROGRAMS = 256  # of a launch
_LINE = 32  # words of a cache line


@dataclass(frozen=True)
class RowMemory:
    """Memory of launches that never run at the same time.

    Launches that do not meet at the counter exchange rows through `words`. A launch uses the half
    of its parity, which holds nothing but ones when it begins, and fills the other half with ones.
    """

    counter: Tensor  # [1] int32, of meetings
    launches: Tensor  # [1] int32, how many launches have used `words`
    words: Tensor  # [2, W] int32

    @classmethod
    def new(
        cls, hidden: int, inner: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
    ) -> RowMemory:
        """Memory for layers of at most these sizes."""
        width = _values(hidden, inner, dtype) + 2 * MOST_PROGRAMS
        counters = torch.zeros(2, _LINE, dtype=torch.int32, device=device)
        words = torch.full((2, width), -1, dtype=torch.int32, device=device)
        return cls(counters[0, :1], counters[1, :1], words)

    def rows(self, hidden: int, inner: int, dtype: torch.dtype) -> list[Tensor]:
        """The parts of the first half of `words`: two rows [H], one [I], and the sums of squares
        [2, MOST_PROGRAMS] float32."""
        first = _values(hidden, inner, dtype)
        assert first + 2 * MOST_PROGRAMS <= self.words.shape[1], "made for smaller layers"
        values = self.words[0, :first].view(dtype)
        squares = self.words[0, first:][: 2 * MOST_PROGRAMS].view(torch.float32)
        fed = values[2 * hidden :][:inner]
        return [values[:hidden], values[hidden : 2 * hidden], fed, squares]


def _values(hidden: int, inner: int, dtype: torch.dtype) -> int:
    """The words of three rows, in whole cache lines."""
    words = (2 * hidden + inner) * dtype.itemsize // 4
    return -(-words // _LINE) * _LINE
