"""Sums over ranks by packets: what a rank sends, and what it makes of what it gets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from slipstream.kernels.linear.packets.memory import (
    PROGRAMS,
    WORDS,
    PacketMemory,
    num_programs,
    packets_fit,
)
from slipstream.kernels.linear.packets.rank_sums import sum_packets, sum_packets_reference

from ... import interpreter

BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def forgets() -> Iterator[None]:
    yield
    interpreter.elsewhere.clear()


class Exchange:
    """The memory of all ranks on one CPU, where one rank at a time runs."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.every = [torch.zeros(2, PROGRAMS, size, WORDS, dtype=torch.int64) for _ in range(size)]
        interpreter.elsewhere.extend(self.every)
        self.sums = [torch.zeros(PROGRAMS, dtype=torch.int32) for _ in range(size)]

    def memory(self, rank: int) -> PacketMemory:
        peers = tuple(mine.data_ptr() for mine in self.every)
        return PacketMemory(rank, self.size, self.every[rank], peers, self.sums[rank])

    def deliver(self, sender: int, to: int, x: Tensor, dtype: torch.dtype) -> None:
        """Write what `sender` sends in its next sum, as the format says."""
        own = (x.sum(0) if x.dim() == 3 else x).to(dtype)
        for row, values in enumerate(own):
            short = values.view(torch.int16).to(torch.int64) & 0xFFFF
            words = torch.zeros(num_programs(1, len(values)) * WORDS, dtype=torch.int64)
            words[: len(values) // 2] = short[::2] | short[1::2] << 16
            for chunk, part in enumerate(words.view(-1, WORDS)):
                program = row * (len(words) // WORDS) + chunk
                number = int(self.sums[sender][program]) + 1
                self.every[to][number & 1, program, sender] = part | number << 32


def some(dtype: torch.dtype, *shape: int) -> Tensor:
    """Random numbers; in bf16, to which the interpreter does not round, sums of them are exact."""
    return torch.randn(shape) if dtype is torch.float16 else torch.randint(-9, 10, shape) / 8


@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    ("size", "rows", "width", "parts", "adds", "dtype"),
    [
        (2, 1, 1032, 0, False, BF16),
        (2, 3, 96, 3, True, BF16),
        (3, 2, 1600, 2, True, torch.float16),
    ],
)
def test_every_rank_gets_the_sum(
    size: int, rows: int, width: int, parts: int, adds: bool, dtype: torch.dtype
) -> None:
    exchange = Exchange(size)
    for _ in range(3):  # sums in a row take turns with the halves of the memory
        shape = (parts, rows, width) if parts else (rows, width)
        every = [some(dtype, *shape).to(torch.float32 if parts else dtype) for _ in range(size)]
        residual = some(dtype, rows, width).to(dtype) if adds else None
        expected = sum_packets_reference(every, dtype, residual)
        for rank in range(size):
            for sender in range(rank + 1, size):  # those before it have run and sent
                exchange.deliver(sender, rank, every[sender], dtype)
            got = sum_packets(every[rank], exchange.memory(rank), dtype, residual)
            assert torch.equal(got, expected)
    assert exchange.sums[0][: num_programs(rows, width)].tolist() == [3] * num_programs(rows, width)
    assert not exchange.sums[0][num_programs(rows, width) :].any()


@pytest.mark.usefixtures("triton_interpreter")
def test_what_is_sent_has_the_format() -> None:
    """What the kernel of one rank sends is what the other test delivers."""
    exchange, other = Exchange(2), Exchange(2)
    x = torch.randn(2, 1032).to(BF16)
    exchange.deliver(1, 0, x, BF16)  # so that rank 0 need not wait
    sum_packets(x, exchange.memory(0), BF16)
    other.deliver(0, 1, x, BF16)
    assert torch.equal(exchange.every[1], other.every[1])


def test_only_few_rows_of_16_bits_fit() -> None:
    assert packets_fit(64, 4096, BF16) and packets_fit(1, 8, torch.float16)
    assert not packets_fit(0, 4096, BF16) and not packets_fit(129, 4096, BF16)
    assert not packets_fit(1, 4096, torch.float32) and not packets_fit(1, 4100, BF16)
