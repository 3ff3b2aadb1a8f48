"""Sums by packets: which rows they take, what a layer leaves to them, and where there are none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from slipstream.kernels.linear.packets.memory import PacketMemory
from slipstream.kernels.linear.packets.rank_sums import sum_packets_reference
from slipstream.runner.models.layers import WeightFormat
from slipstream.runner.models.sharded import input_linear, row_linear
from slipstream.runner.parallel import packet_sums
from slipstream.runner.parallel.packet_sums import PacketSums, open_packet_sums, trial_of
from slipstream.runner.parallel.ranks import Ranks

from .threads import on_ranks

BF16, F32 = torch.bfloat16, torch.float32


def nothing(size: int) -> PacketMemory:
    empty = torch.empty(0, dtype=torch.int64)
    return PacketMemory(0, size, empty, (), empty)


@pytest.mark.parametrize(
    ("size", "rows", "width", "dtype", "fits"),
    [
        (2, 128, 4096, BF16, True),
        (2, 129, 4096, BF16, False),
        (4, 32, 4096, torch.float16, True),
        (4, 33, 4096, BF16, False),
        (8, 8, 8192, BF16, True),
        (8, 9, 8192, BF16, False),
        (2, 1, 4096, F32, False),
        (2, 1, 4100, BF16, False),  # not whole vectors of 16 bytes
    ],
)
def test_few_rows_fit(size: int, rows: int, width: int, dtype: torch.dtype, fits: bool) -> None:
    assert PacketSums(nothing(size)).fit(rows, width, dtype) is fits


class Counted(PacketSums):
    """Adds up rows of float32 through another communicator."""

    def __init__(self, ranks: Ranks) -> None:
        super().__init__(nothing(ranks.size))
        self.ranks, self.seen = ranks, list[tuple[tuple[int, ...], bool]]()

    def fit(self, num_rows: int, width: int, dtype: torch.dtype) -> bool:
        return num_rows <= 4

    def sum(self, x: Tensor, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
        self.seen.append((tuple(x.shape), residual is not None))
        total = self.ranks.communicator.all_reduce(x.sum(0) if x.dim() == 3 else x).to(dtype)
        return total if residual is None else total + residual

    def gather(self, x: Tensor) -> Tensor:
        self.seen.append((tuple(x.shape), False))
        return self.ranks.communicator.all_gather(x)


def test_small_tensors_are_gathered_by_packets() -> None:
    sums = PacketSums(nothing(2))
    assert sums.gathers(torch.empty(8, 16000, dtype=BF16))
    assert not sums.gathers(torch.empty(64, 16000, dtype=BF16))  # beyond 1 MiB
    assert not PacketSums(nothing(4)).gathers(torch.empty(9, 16000, dtype=BF16))
    assert not sums.gathers(torch.empty(1, 3, dtype=BF16))

    def run(ranks: Ranks) -> tuple[list[Tensor], list[tuple[tuple[int, ...], bool]]]:
        counted = Counted(ranks)
        own = replace(ranks, packets=counted)
        small, large = torch.arange(6.0).view(2, 3), torch.ones(2, 1 << 18)
        return [own.side_by_side(small + 6 * ranks.rank, 5), own.gather(large)], counted.seen

    for (logits, ones), seen in on_ranks(2, run):
        assert logits.tolist() == [[0, 1, 2, 6, 7], [3, 4, 5, 9, 10]]
        assert ones.shape == (2, 2, 1 << 18) and bool((ones == 1).all())
        assert seen == [((2, 3), False)]  # the other one is too large


def test_a_layer_leaves_its_residual_to_the_sum() -> None:
    whole, residual = torch.randn(6, 10), torch.randn(8, 6)
    x = torch.randn(8, 10)

    def run(ranks: Ranks) -> tuple[list[Tensor], list[tuple[tuple[int, ...], bool]]]:
        counted = Counted(ranks)
        fmt = WeightFormat(torch.device("cpu"), F32, ranks=replace(ranks, packets=counted))
        layer = row_linear(10, 6, fmt, role="down")
        own = slice(5 * ranks.rank, 5 * ranks.rank + 5)
        assert layer.weight is not None
        layer.weight.copy_(whole[:, own])
        assert [layer.adds(rows) for rows in (1, 4, 5)] == [True, True, False]
        outputs = [layer.add(x[:n, own], residual[:n]) for n in (1, 4, 8)]
        outputs += [layer.parts(x[:n, own]) for n in (4, 8)]
        return outputs, counted.seen

    for outputs, seen in on_ranks(2, run):
        for got, rows in zip(outputs[:3], (1, 4, 8), strict=True):
            torch.testing.assert_close(got, x[:rows] @ whole.T + residual[:rows])
        for got, rows in zip(outputs[3:], (4, 8), strict=True):
            torch.testing.assert_close(got, x[:rows] @ whole.T)
        assert seen == [((1, 6), True), ((4, 6), True), ((4, 6), False)]


def test_a_divided_input_is_cut_whatever_takes_it() -> None:
    """Every rank has the input whole, and each method reads the rank's own columns."""
    whole, residual, x = torch.randn(6, 10), torch.randn(8, 6), torch.randn(8, 10)

    def run(ranks: Ranks) -> list[Tensor]:
        own = replace(ranks, packets=Counted(ranks))
        fmt = WeightFormat(torch.device("cpu"), F32, ranks=own)
        layer = input_linear(10, 6, fmt)
        assert layer.weight is not None
        layer.weight.copy_(whole[:, 5 * ranks.rank : 5 * ranks.rank + 5])
        with pytest.raises(AssertionError):
            layer.pick(x)  # from the logits of a part of the input
        assert not layer.can_pick
        outputs = [layer(x)]
        for rows in (4, 8):  # by packets, and otherwise
            outputs += [layer.parts(x[:rows]), layer.add(x[:rows], residual[:rows])]
        return outputs

    exact = x @ whole.T
    expected = [exact, exact[:4], exact[:4] + residual[:4], exact, exact + residual]
    for outputs in on_ranks(2, run):
        for got, right in zip(outputs, expected, strict=True):
            torch.testing.assert_close(got, right)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_without_shared_memory_there_are_none(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[list[int]] = []

    def least(values: Sequence[int]) -> list[int]:
        asked.append(list(values))
        return list(values)

    assert open_packet_sums(0, 2, torch.device("cuda"), least) is None
    assert asked == [[False]] and "sums over the GPUs take several kernels" in caplog.text


def open_on_cpus(ranks: Ranks) -> PacketSums | None:
    least = ranks.communicator.least
    return open_packet_sums(ranks.rank, ranks.size, torch.device("cpu"), least)


def test_no_rank_launches_before_every_rank_has_compiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def compile_sum(x: Tensor, memory: PacketMemory, dtype: torch.dtype) -> None:
        if memory.rank == 1:
            raise RuntimeError("no compiler")

    def launched(*args: object) -> Tensor:
        raise AssertionError("the kernel would wait for rank 1")

    monkeypatch.setattr(packet_sums, "compile_sum", compile_sum)
    monkeypatch.setattr(PacketSums, "sum", launched)
    assert on_ranks(2, open_on_cpus) == [None, None]
    assert sorted(record.getMessage().split(": ", 1)[1] for record in caplog.records) == [
        "RuntimeError: no compiler",
        "another rank could not compile the kernels",
    ]


@pytest.mark.parametrize("size", range(2, 9))
def test_the_sums_of_the_trial_are_exact(size: int) -> None:
    """Otherwise a group of four GPUs, whose sums are right, takes them for wrong."""
    trials = [trial_of(rank, size, torch.device("cpu")) for rank in range(size)]
    total = sum_packets_reference([x for x, _ in trials], BF16)
    assert all(torch.equal(expected, total) for _, expected in trials)
    assert len(total.unique()) == 7


@pytest.mark.parametrize("wrong", ["", "sum", "gather"])
def test_a_rank_with_wrong_numbers_leaves_no_other_waiting(
    wrong: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As the kernels, `sum` and `gather` wait for the other rank, and every rank calls both
    equally often. The numbers of the first rank are wrong."""

    def empty(count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.ones(count, dtype=dtype)

    addresses = SimpleNamespace(buffer_ptrs=[16, 32])
    monkeypatch.setattr(symmetric, "empty", empty)
    monkeypatch.setattr(symmetric, "rendezvous", lambda mine, group: addresses)
    monkeypatch.setattr(packet_sums, "compile_sum", lambda *args: None)
    monkeypatch.setattr(packet_sums, "compile_gather", lambda *args: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(
        packet_sums.dist, "group", SimpleNamespace(WORLD=SimpleNamespace(group_name=""))
    )

    def run(ranks: Ranks) -> tuple[bool, int]:
        calls = 0

        class Meeting(PacketSums):
            def __init__(self, memory: PacketMemory) -> None:
                assert memory.peers == (16, 32) and not memory.mine.any()

            def sum(self, x: Tensor, dtype: torch.dtype, residual: Tensor | None = None) -> Tensor:
                nonlocal calls
                calls += 1
                return ranks.communicator.all_reduce(x) + (wrong == "sum" and ranks.rank == 0)

            def gather(self, x: Tensor) -> Tensor:
                nonlocal calls
                calls += 1
                return ranks.communicator.all_gather(x) + (wrong == "gather" and ranks.rank == 0)

        made[ranks.rank] = Meeting
        return open_on_cpus(ranks) is not None, calls

    made: dict[int, type[PacketSums]] = {}
    monkeypatch.setattr(packet_sums, "PacketSums", lambda memory: made[memory.rank](memory))
    assert on_ranks(2, run) == [(not wrong, 6)] * 2
    assert ("the sums are wrong" in caplog.text) == (wrong == "sum")
    assert ("what is gathered is wrong" in caplog.text) == (wrong == "gather")
