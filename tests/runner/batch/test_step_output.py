"""Results on their way to the host: trimmed rows, errors, and results published before drafting."""

from __future__ import annotations

import threading

import pytest
import torch

from slipstream.runner.batch.host_copy import HostCopy, PinnedPool
from slipstream.runner.batch.step_output import (
    PromptChunk,
    RowLayout,
    StepHandle,
    StepTensors,
    TokenLogprobTensors,
)
from slipstream.runner.step.device_queue import DeviceQueue


def logprobs(rows: int, top: int) -> TokenLogprobTensors:
    ids = torch.arange(rows)
    tops = torch.arange(rows * top).reshape(rows, top)
    return TokenLogprobTensors(ids, -ids.float(), ids + 1, tops, -tops.float())


def tensors() -> StepTensors:
    return StepTensors(
        sampled_token_ids=torch.tensor([[4, 5, -1], [-1, -1, -1], [6, -1, -1]]),
        num_sampled=torch.tensor([2, 0, 1], dtype=torch.int32),
        num_draft_tokens=torch.tensor([2, 0, 1], dtype=torch.int32),
        has_nan=torch.tensor([False, False, True]),
        logprobs=logprobs(9, 2),
        prompt_logprobs=[PromptChunk(1, 1, logprobs(2, 3))],
    )


def test_rows_are_trimmed_to_what_was_sampled_and_asked() -> None:
    handle = StepHandle()
    assert not handle.done()
    handle.publish(tensors(), RowLayout([2, None, 1]), None)
    assert handle.done()
    first, chunk, last = handle.get()
    assert first.token_ids == [4, 5] and first.num_draft_tokens == 2
    assert first.logprobs == [(0, 0.0, 1, [0, 1], [0.0, -1.0]), (1, -1.0, 2, [2, 3], [-2.0, -3.0])]
    assert chunk.token_ids == [] and chunk.logprobs is None
    assert chunk.prompt_logprobs == [(0, 0.0, 1, [0], [0.0]), (1, -1.0, 2, [3], [-3.0])]
    assert last.has_nan and last.logprobs == [(6, -6.0, 7, [12], [-12.0])]
    assert last.prompt_logprobs is None
    assert handle.get()[0].token_ids == [4, 5]  # reading twice does no harm


def test_a_failed_step_raises_and_a_published_one_does_not() -> None:
    failed, empty = StepHandle(), StepHandle()
    assert failed.fail(ValueError("no"))
    with pytest.raises(ValueError, match="no"):
        failed.get()
    empty.publish_empty()
    assert not empty.fail(ValueError("too late"))
    assert empty.get() == []


def test_a_host_copy_of_cpu_tensors_is_the_tensors() -> None:
    source = torch.arange(3)
    copy = HostCopy([source], None)
    assert copy.wait()[0] is source


def test_host_memory_is_used_again_once_it_was_given_back() -> None:
    pool = PinnedPool(pin=False)
    first = pool.take(torch.empty(3, 5, dtype=torch.int64))
    other = pool.take(torch.empty(3, 5, dtype=torch.int64))
    assert first.shape == (4, 5) and first.dtype == torch.int64
    assert first is not other  # both are in use
    pool.give(first)
    assert pool.take(torch.empty(3, 5, dtype=torch.int32)) is not first
    assert pool.take(torch.empty(4, 5, dtype=torch.int64)) is first  # it had a row to spare
    pool.give(first)
    large = pool.take(torch.empty(5, 5, dtype=torch.int64))
    assert large.shape == (8, 5) and large is not first
    assert pool.take(torch.empty(4, 5, dtype=torch.int64)) is not first  # too small once, dropped
    assert pool.take(torch.empty(())).shape == ()
    assert len(pool.take(torch.empty(0, 5, dtype=torch.int64))) == 1


def test_jobs_run_in_order_on_one_thread_without_gradients() -> None:
    queue, seen = DeviceQueue(torch.device("cpu")), []
    gate = threading.Event()

    def job(index: int) -> None:
        gate.wait(5)
        seen.append((index, threading.get_ident(), torch.is_inference_mode_enabled()))

    for index in range(4):
        queue.submit(lambda index=index: job(index))  # type: ignore[misc]
    assert seen == []  # the caller does not wait
    gate.set()
    queue.call(lambda: job(4))
    queue.shutdown()
    assert [index for index, _, _ in seen] == [0, 1, 2, 3, 4]
    assert len({thread for _, thread, _ in seen}) == 1
    assert seen[0][1] != threading.get_ident()
    assert all(inference for _, _, inference in seen)


def test_an_error_of_a_call_reaches_the_caller() -> None:
    queue = DeviceQueue(torch.device("cpu"))

    def job() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        queue.call(job)
    queue.shutdown()
