"""One step's buffers: series and metadata agree on host and device, padded to the descriptor."""

from __future__ import annotations

import pytest
import torch

from slipstream.configs.graphs import BatchExecutionDescriptor, CUDAGraphMode
from slipstream.runner.batch.input_batch import InputBatch, InputBuffers
from slipstream.runner.batch.request_table import RequestTable
from slipstream.runner.graphs.dispatch import eager_descriptor
from slipstream.runner.messages import SamplingParams
from slipstream.runner.scheduling.plan import NewRequest, ScheduledRow, StepPlan

CPU, MAX_LEN, DRAFTS = torch.device("cpu"), 32, 2


def make(num_reqs: int = 4, num_tokens: int = 24) -> tuple[InputBuffers, RequestTable]:
    buffers = InputBuffers(num_reqs, num_tokens, MAX_LEN, DRAFTS, [4, 4], [8, 8], CPU)
    table = RequestTable(num_reqs, MAX_LEN, 50, DRAFTS, [8, 8], CPU)
    plan = StepPlan(0)
    for slot in range(num_reqs):
        tokens = [10 * slot + offset for offset in range(9)]
        blocks = [[3 * slot + 1, 3 * slot + 2, 3 * slot + 3]] * 2
        sampling = SamplingParams(seed=0, max_tokens=9)
        plan.new_requests.append(NewRequest(slot, tokens, 9, 0, blocks, sampling))
    table.stage(plan)
    table.apply_staged()
    return buffers, table


def gather(
    buffers: InputBuffers, table: RequestTable, lens: list[int], desc: BatchExecutionDescriptor
) -> InputBatch:
    rows = [
        ScheduledRow(slot, count, 0, 0, True, 0)
        for slot, count in zip(reversed(range(len(lens))), lens, strict=True)
    ]
    return buffers.gather(rows, lens, [0] * len(lens), table, desc, None)


def test_padding_after_a_larger_batch() -> None:
    buffers, table = make()
    gather(buffers, table, [5, 6, 4, 7], eager_descriptor(22, 4, None))
    batch = gather(buffers, table, [2, 3, 1], eager_descriptor(8, 4, None))
    assert batch.query_start_loc.tolist() == [0, 2, 5, 6, 6]
    assert batch.query_start_loc.equal(batch.query_start_loc_cpu)
    assert batch.idx_mapping.tolist() == [2, 1, 0, -1]
    assert batch.seq_lens.tolist() == [2, 3, 1, 0]
    assert batch.input_ids.tolist() == [20, 21, 10, 11, 12, 0, 0, 0]
    assert batch.cu_num_logits.tolist() == batch.cu_num_logits_cpu == [0, 1, 2, 3]
    assert batch.logits_indices.tolist() == [1, 4, 5]
    # What lies beyond the padded rows holds the same convention, for whoever pads further.
    assert buffers.query_start_loc.tolist() == [0, 2, 5, 6, 6]
    for group in batch.common:
        assert (group.num_reqs, group.num_actual_tokens) == (4, 8)
        assert (group.max_query_len, group.max_seq_len) == (3, 3)
        assert group.query_start_loc.shape == (5,) and group.slot_mapping.shape == (8,)
        assert group.block_table.shape == (4, 8) and group.seq_lens.shape == (4,)
        assert group.seq_lens_cpu_upper_bound.tolist() == batch.seq_lens.tolist()
        assert group.slot_mapping[6:].eq(-1).all() and group.slot_mapping[:6].ge(4).all()
        assert not group.block_table[3].any()


def test_tensors_of_a_step_are_views_at_fixed_addresses() -> None:
    buffers, table = make()
    addresses = {name: tensor.data_ptr() for name, tensor in buffers.tensors().items()}
    for lens in ([5, 6, 4, 7], [1], [2, 2]):
        batch = gather(buffers, table, lens, eager_descriptor(sum(lens), len(lens), None))
        for name in ("input_ids", "positions", "seq_lens", "query_start_loc", "idx_mapping"):
            assert getattr(batch, name).data_ptr() == addresses[name]
        assert batch.common[1].block_table.data_ptr() == addresses["block_tables[1]"]
    assert {name: tensor.data_ptr() for name, tensor in buffers.tensors().items()} == addresses


def test_host_copies_of_two_steps_in_flight_are_apart() -> None:
    buffers, table = make()
    first = gather(buffers, table, [5, 6], eager_descriptor(11, 2, None))
    bounds = first.common[0].seq_lens_cpu_upper_bound
    held = first.query_start_loc_cpu.tolist(), bounds.tolist()
    gather(buffers, table, [1, 1, 1], eager_descriptor(3, 3, None))
    assert (first.query_start_loc_cpu.tolist(), bounds.tolist()) == held


@pytest.mark.parametrize("other", ["gathered", "dummy"])
def test_a_batch_is_placed_again_after_another_one(other: str) -> None:
    buffers, table = make()
    desc = BatchExecutionDescriptor(CUDAGraphMode.FULL, 2, 2, 1)
    for _ in range(2):
        batch = buffers.place([3, 1], [0, 0], desc, 1)
        assert batch.idx_mapping.tolist() == [3, 1]
        assert batch.query_start_loc.tolist() == [0, 1, 2]
        assert buffers.place([3, 1], [0, 0], desc, 1) is batch  # uploaded once
        if other == "dummy":
            buffers.fill_dummy(desc)
        else:
            gather(buffers, table, [5, 6], eager_descriptor(11, 2, None))


def test_a_batch_larger_than_the_buffers_is_a_bug() -> None:
    buffers, table = make()
    with pytest.raises(AssertionError):
        gather(buffers, table, [9, 9, 9], eager_descriptor(27, 3, None))


@pytest.mark.parametrize(
    "desc",
    [
        BatchExecutionDescriptor(CUDAGraphMode.FULL, 9, 3, 3),
        BatchExecutionDescriptor(CUDAGraphMode.FULL, 10, 4),
        BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, 16),
    ],
)
def test_dummy_rows_write_nothing_and_bound_everything(desc: BatchExecutionDescriptor) -> None:
    buffers, table = make()
    gather(buffers, table, [5, 6, 4, 7], eager_descriptor(22, 4, None))
    common = buffers.fill_dummy(desc)[0]
    num_reqs = desc.num_reqs or 4
    assert (common.num_reqs, common.num_actual_tokens) == (num_reqs, desc.num_tokens)
    assert common.query_start_loc[-1] == desc.num_tokens
    assert common.query_start_loc.equal(common.query_start_loc_cpu)
    lens = common.query_start_loc.diff()
    assert lens.min() >= 0 and lens.max() <= common.max_query_len
    assert common.seq_lens.equal(lens)
    assert common.max_seq_len == MAX_LEN  # a capture bakes it
    assert common.slot_mapping.eq(-1).all() and not common.block_table.any()
    if desc.uniform_token_count:
        assert lens.eq(desc.uniform_token_count).all()
