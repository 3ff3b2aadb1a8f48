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
    gather_fits,
    num_programs,
    packets_fit,
)
from slipstream.kernels.linear.packets.rank_gather import gather_packets
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

    def deliver_words(self, sender: int, to: int, x: Tensor) -> None:
        """Write what `sender` sends in its next gather."""
        own = x.flatten().view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        padded = torch.zeros(-(-len(own) // WORDS) * WORDS, dtype=torch.int64)
        padded[: len(own)] = own
        for program, part in enumerate(padded.view(-1, WORDS)):
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
        of_x = torch.float32 if parts and dtype is BF16 else dtype  # parts may have 16 bits
        every = [some(dtype, *shape).to(of_x) for _ in range(size)]
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


@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.parametrize(
    ("size", "shape", "dtype"), [(2, (5, 3), torch.float32), (3, (2, 700), BF16)]
)
def test_every_rank_gathers_the_bits_of_all(
    size: int, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Also between sums, which take turns with the same halves of the memory."""
    exchange = Exchange(size)
    for _ in range(3):
        every = [torch.randn(shape).to(dtype) for _ in range(size)]
        every[0].view(-1)[:3] = torch.tensor([-0.0, float("-inf"), float("nan")])
        for rank in range(size):
            for sender in range(rank + 1, size):
                exchange.deliver_words(sender, rank, every[sender])
            got = gather_packets(every[rank], exchange.memory(rank))
            assert torch.equal(got.view(torch.uint8), torch.stack(every).view(torch.uint8))
        rows = [some(BF16, 1, 96).to(BF16) for _ in range(size)]
        for rank in range(size):
            for sender in range(rank + 1, size):
                exchange.deliver(sender, rank, rows[sender], BF16)
            got = sum_packets(rows[rank], exchange.memory(rank), BF16)
            assert torch.equal(got, sum_packets_reference(rows, BF16))


@pytest.mark.usefixtures("triton_interpreter")
def test_what_is_gathered_is_sent_as_the_format_says() -> None:
    exchange, other = Exchange(2), Exchange(2)
    x = torch.randn(3, 350)
    exchange.deliver_words(1, 0, x)  # so that rank 0 need not wait
    gather_packets(x, exchange.memory(0))
    other.deliver_words(0, 1, x)
    assert torch.equal(exchange.every[1], other.every[1])
    assert exchange.sums[0].tolist() == [1, 1, 1] + [0] * (PROGRAMS - 3)


def test_only_whole_words_are_gathered() -> None:
    assert gather_fits(torch.empty(7, 3)) and gather_fits(torch.empty(2, 3, dtype=BF16))
    assert not gather_fits(torch.empty(1, 3, dtype=BF16)) and not gather_fits(torch.empty(0, 3))
    assert not gather_fits(torch.empty(4, 4).T[1:]) and gather_fits(torch.empty(512, 512))
    assert not gather_fits(torch.empty(513, 512))
    assert not gather_fits(torch.empty(5, dtype=BF16)[1:])  # not on the border of a word
