"""Rows that go to single ranks through gloo: the sums of the other exchange, and equal loads."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.configs.load import load_config
from slipstream.configs.options import ConfigError
from slipstream.configs.schema import Config
from slipstream.kernels.linear.experts import ExpertWeights
from slipstream.kernels.linear.moe import run_experts_reference
from slipstream.runner.parallel.collectives import Collectives
from slipstream.runner.parallel.experts import ExpertRanks, RowExchange, padded_counts

from .gloo import on_gloo

CPU = torch.device("cpu")
HIDDEN, INNER, EXPERTS, TOP_K = 6, 8, 12, 3
# The ways of the exchange, and whether steps of each have graphs.
WAYS = {"gather": (False, False), "sorted": (True, False), "in graphs": (True, True)}


class Counted(Collectives):
    """Counts the rows that leave in blocks of different sizes."""

    num_sent = 0

    def all_to_all(
        self, x: Tensor, received: Sequence[int] | None = None, sent: Sequence[int] | None = None
    ) -> Tensor:
        self.num_sent += 0 if sent is None else sum(sent)
        return super().all_to_all(x, received, sent)


def random_experts(dtype: torch.dtype) -> ExpertWeights:
    generator = torch.Generator().manual_seed(1)
    gate_up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator)
    down = torch.randn(EXPERTS, HIDDEN, INNER, generator=generator)
    return ExpertWeights(gate_up.to(dtype), down.to(dtype))


def some_rows(
    rng: random.Random, engines: int, dtype: torch.dtype
) -> tuple[list[int], list[tuple[Tensor, Tensor, Tensor]]]:
    """How many rows of each engine are real, and its rows, weights and ids with padding. At times
    an engine is idle and runs one dummy row, and all rows want the experts of one rank."""
    real = [rng.choice((0, 1, 2, 7)) for _ in range(engines)]
    generator = torch.Generator().manual_seed(rng.randrange(1000))
    bound, batches = rng.choice((TOP_K, EXPERTS)), []
    for count in real:
        rows = max(count, 1) + rng.choice((0, 3))
        x = torch.randn(rows, HIDDEN, generator=generator).to(dtype)
        ids = torch.rand(rows, bound, generator=generator).argsort(1)[:, :TOP_K]
        batches.append((x, torch.rand(rows, TOP_K, generator=generator), ids))
    return real, batches


@pytest.mark.parametrize(
    ("engines", "ranks", "dtype"),
    [(2, 1, torch.float32), (2, 2, torch.float32), (3, 1, torch.bfloat16)],
)
def test_all_ways_give_the_same_sums_and_loads(
    engines: int, ranks: int, dtype: torch.dtype
) -> None:
    size, each = engines * ranks, EXPERTS // (engines * ranks)
    peers = [range(start, size, ranks) for start in range(ranks)]
    rng, whole = random.Random(3), random_experts(dtype)
    steps = [some_rows(rng, engines, dtype) for _ in range(20)]

    def work(rank: int, collectives: Collectives) -> list[dict[str, tuple[Tensor, Tensor, int]]]:
        engine = rank // ranks
        communicator = Counted(engines, CPU, collectives._group)
        experts = ExpertWeights(
            whole.gate_up[rank * each :][:each], whole.down[rank * each :][:each]
        )
        shared = {
            way: ExpertRanks(
                rank, size, RowExchange(communicator, engines, CPU, all_to_all), engine
            )
            for way, (all_to_all, _) in WAYS.items()
        }
        found = []
        for real, batches in steps:
            most, counts = max(len(x) for x, *_ in batches), padded_counts(real, real)
            results = {}
            for way, (_, has_graphs) in WAYS.items():
                communicator.num_sent, own = 0, shared[way].share(EXPERTS)
                loads = torch.zeros(1 + each, dtype=torch.int64)
                shared[way].exchange.begin_step(most, most, counts, has_graphs)
                out = shared[way].run(
                    *batches[engine], own, loads,
                    lambda *args: run_experts_reference(args[0], experts, *args[1:]),
                )  # fmt: skip
                results[way] = out, loads, communicator.num_sent
            found.append(results)
        return found

    by_rank: list[Any] = on_gloo(peers, work)
    for step, (real, batches) in enumerate(steps):
        pairs = sum(real) * TOP_K
        for engine, (x, weights, ids) in enumerate(batches):
            own, own_ids = slice(real[engine]), ids[: real[engine]]
            expected = torch.zeros_like(x)
            expected[own] = run_experts_reference(x[own], whole, weights[own], own_ids)
            here = [by_rank[rank][step] for rank in range(engine * ranks, (engine + 1) * ranks)]
            for way in WAYS:
                total = sum(results[way][0].float() for results in here)
                close = {} if dtype == torch.float32 else {"atol": 0.3, "rtol": 0.05}
                torch.testing.assert_close(total, expected.float(), **close)
            for results in here:
                gathered, loads, _ = results["gather"]
                for way in ("sorted", "in graphs"):
                    if dtype == torch.float32:  # and two engines, whose sums have one order
                        assert torch.equal(results[way][0], gathered)
                    assert torch.equal(results[way][1], loads)
                assert int(loads.sum()) == pairs
            # A row goes once to each rank with experts of it, and the sum of these comes back.
            wanted = sum(len({int(i) // each for i in row}) for row in own_ids)
            sent = sum(results["sorted"][2] for results in here)
            received = sum(
                len({int(i) // each for i in row} & {rank})
                for other, (_, _, all_ids) in enumerate(batches)
                for row in all_ids[: real[other]]
                for rank in range(engine * ranks, (engine + 1) * ranks)
            )
            assert sent == wanted + received
            assert all(results[way][2] == 0 for results in here for way in ("gather", "in graphs"))


def test_the_flag_needs_engines_that_share_experts() -> None:
    flags = {"all2all_backend": "all_to_all", "tensor_parallel_size": 2}
    for more in ({}, {"enable_expert_parallel": True}, {"data_parallel_size": 2}):
        with pytest.raises(ConfigError, match="all_to_all needs --enable-expert-parallel and"):
            load_config(flags | more)
    shared = {"enable_expert_parallel": True, "data_parallel_size": 2}
    config = load_config(flags | shared)
    assert isinstance(config, Config) and config.parallel.all2all_backend == "all_to_all"
