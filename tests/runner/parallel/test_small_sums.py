"""Which sums go through shared GPU memory, and what happens where there is none."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from slipstream.configs.schema import Config, ModelConfig, ParallelConfig
from slipstream.runner.engine import rank, tensor_parallel
from slipstream.runner.parallel import collectives
from slipstream.runner.parallel.commands import RankFault, answer_decoder
from slipstream.runner.parallel.group import RankEnd
from slipstream.runner.parallel.small_sums import Way, all_can, open_small_sums, way_of
from slipstream.runner.process import EngineOrders, WorkerOrders

BF16, CUDA = torch.bfloat16, torch.device("cuda")


@pytest.mark.parametrize(
    ("size", "num_bytes", "dtype", "way"),
    [
        (2, 8 << 10, BF16, "one_shot"),
        (2, 1 << 20, BF16, "one_shot"),
        (2, (1 << 20) + 16, BF16, "nccl"),  # two shots would move as many bytes
        (4, 512 << 10, torch.float32, "one_shot"),
        (4, 1 << 20, BF16, "two_shot"),
        (8, 512 << 10, BF16, "two_shot"),
        (8, 4 << 20, BF16, "two_shot"),
        (8, 8 << 20, BF16, "nccl"),
        (2, 8 << 10, torch.float16, "nccl"),  # torch's kernels do not add it
        (2, 8 << 10, torch.int64, "nccl"),
        (2, 8, BF16, "nccl"),  # not whole vectors of 16 bytes
        (16, 8 << 10, BF16, "nccl"),
    ],
)
def test_the_way_follows_from_size_and_type(
    size: int, num_bytes: int, dtype: torch.dtype, way: Way
) -> None:
    assert way_of(size, num_bytes, dtype) == way


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_without_shared_memory_all_sums_go_through_nccl(caplog: pytest.LogCaptureFixture) -> None:
    asked: list[list[int]] = []

    def least(values: Sequence[int]) -> list[int]:
        asked.append(list(values))
        return list(values)

    assert open_small_sums(2, CUDA, least) is None
    assert len(asked) == 2 and asked[1] == [False]  # the host, then the first step
    assert "small sums over the GPUs go through NCCL" in caplog.text
    assert open_small_sums(2, torch.device("cpu"), least) is None and len(asked) == 2


def test_memory_is_not_shared_between_machines() -> None:
    def least(values: Sequence[int]) -> list[int]:
        return [min(values[0], 5), min(values[1], -9)]  # those of two other hosts

    assert open_small_sums(2, CUDA, least) is None


@pytest.mark.parametrize("disabled", [False, True])
def test_engines_that_share_experts_add_up_small_sums_each_in_a_group_of_its_own(
    disabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks, two of each engine: memory is shared by ranks 2 and 3, under their group."""
    groups: list[tuple[list[int], bool]] = []
    opened: list[tuple[int, Any, Any]] = []

    def subgroup(members: Sequence[Sequence[int]], rank: int, on_host: bool = False) -> Any:
        assert sorted(sum(map(list, members), [])) == [0, 1, 2, 3]  # every rank makes every group
        groups.append(next((list(ranks), on_host) for ranks in members if rank in ranks))
        return groups[-1]

    def open_sums(size: int, device: torch.device, least: Any, group: Any, give_up: Any) -> None:
        opened.append((size, group, give_up))

    monkeypatch.setattr(tensor_parallel, "meet", lambda *args: None)
    monkeypatch.setattr(tensor_parallel, "subgroup", subgroup)
    monkeypatch.setattr(collectives, "open_small_sums", open_sums)
    ended: list[str] = []
    parallel = ParallelConfig(2, 2, enable_expert_parallel=True, disable_custom_all_reduce=disabled)
    config = Config(model=ModelConfig(device="cpu"), parallel=parallel)
    ranks, engines = tensor_parallel.join_ranks(
        config, 1, "", None, EngineOrders(1, 2, "folder"), give_up=ended.append
    )
    assert ranks is not None and (ranks.rank, ranks.size) == (1, 2)
    assert engines is not None and (engines.rank, engines.experts.rank) == (1, 3)
    assert groups == [([2, 3], False), ([1, 3], False), ([1, 3], True)]
    assert opened == ([] if disabled else [(2, ([2, 3], False), ended.append)])


def test_a_trial_that_waits_for_a_lost_rank_ends_its_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ended, told = threading.Event(), list[str]()

    def wait_for_a_lost_rank() -> None:
        assert ended.wait(20)

    def give_up(sentence: str) -> None:
        told.append(sentence)
        ended.set()

    steps = (wait_for_a_lost_rank,)
    assert all_can(steps, list, "loss", "other", seconds=0.05, give_up=give_up)
    [sentence] = told
    assert "within 0.05 seconds; start with --disable-custom-all-reduce" in sentence
    assert sentence in caplog.text
    ended.clear()
    assert all_can((lambda: None,), list, "loss", "other", seconds=0.05, give_up=give_up)
    assert not ended.wait(0.1)  # the limit ends with the trial


def test_the_server_is_told_why_a_rank_ends_that_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first rank takes the sentence of another one for the reason why the group ends."""
    statuses: list[int] = []
    monkeypatch.setattr(rank, "end_now", statuses.append)
    with zmq.Context() as context, context.socket(zmq.PULL) as answers:
        answers.bind(f"ipc://{tmp_path}/answers")
        where = {"endpoint": f"ipc://{tmp_path}/rank1", "answers": f"ipc://{tmp_path}/answers"}
        end = RankEnd(WorkerOrders(parent_pid=0, config=Config(), rank=1, **where))
        rank._give_up(end, 1, "the GPUs did not finish")
        assert answers.poll(5000) and statuses == [1]
        message = "tensor-parallel rank 1 ended: the GPUs did not finish"
        assert answer_decoder.decode(answers.recv()) == RankFault(1, message)


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPUs")
def test_the_script_that_measures_sums_says_where_they_cannot_be_measured() -> None:
    script = Path(__file__).parents[2] / "lab" / "measure_allreduce.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert done.stdout.count("the GPUs cannot share memory") == 2
