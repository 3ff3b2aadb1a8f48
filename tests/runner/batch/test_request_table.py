"""Permanent rows: staged writes, reset of reused slots, and the order of freeing and filling."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from slipstream.runner.batch.request_table import RequestTable
from slipstream.runner.messages import SamplingParams
from slipstream.runner.scheduling.plan import NewBlocks, NewRequest, StepPlan

SLOTS, MAX_LEN, VOCAB, DRAFTS, BLOCKS = 5, 16, 40, 3, (8, 4)


def make_table() -> RequestTable:
    return RequestTable(SLOTS, MAX_LEN, VOCAB, DRAFTS, BLOCKS, torch.device("cpu"), VOCAB)


def sampling(**options: Any) -> SamplingParams:
    return SamplingParams(**({"seed": 7, "max_tokens": 9} | options))


def new(slot: int, tokens: list[int], blocks: list[list[int]], **options: Any) -> NewRequest:
    prompt_len = options.pop("prompt_len", len(tokens))
    computed = options.pop("computed", 0)
    return NewRequest(slot, tokens, prompt_len, computed, blocks, sampling(**options))


def apply(table: RequestTable, **changes: Any) -> None:
    table.stage(StepPlan(0, **changes))
    table.apply_staged()


def test_a_new_request_fills_its_row_and_no_other() -> None:
    table = make_table()
    before = [tensor.clone() for tensor, _, _ in table.per_slot_tensors()]
    request = new(2, [5, 6, 7, 8], [[1, 2], [3]], prompt_len=3, computed=2, temperature=0.5)
    apply(table, new_requests=[request])
    assert table.all_token_ids[2].tolist() == [5, 6, 7, 8] + [0] * 12
    lengths = (table.prompt_len, table.prefill_len, table.total_len, table.num_computed_tokens)
    assert [int(tensor[2]) for tensor in lengths] == [3, 4, 4, 2]
    assert table.max_drafts[2] == DRAFTS
    assert table.num_blocks[:, 2].tolist() == [2, 1]
    assert table.block_tables[0][2].tolist() == [1, 2] + [0] * 6
    assert table.block_tables[1][2].tolist() == [3, 0, 0, 0]
    assert table.temperature[2] == 0.5 and table.seed[2] == 7
    others = torch.tensor([0, 1, 3, 4])
    for old, (tensor, dim, _) in zip(before, table.per_slot_tensors(), strict=True):
        assert tensor.index_select(dim, others).equal(old.index_select(dim, others))


def test_arrays_that_share_a_tensor_overlap_nowhere_and_begin_aligned() -> None:
    table = make_table()
    spans = sorted(
        (array.data_ptr(), array.data_ptr() + array.nbytes) for array in table._writes.arrays
    )
    assert all(end <= start for (_, end), (start, _) in zip(spans, spans[1:], strict=False))
    assert all((start - spans[0][0]) % 256 == 0 for start, _ in spans)


@pytest.mark.parametrize("length", [1, 2, 15, 16])
def test_prompts_of_any_length_and_blocks_are_written_together(length: int) -> None:
    """Long and short writes are collected differently but applied by the same scatter."""
    table = RequestTable(SLOTS, 40, VOCAB, DRAFTS, BLOCKS, torch.device("cpu"))
    tokens = [list(range(1, count + 1)) for count in (length, 16, 17, 40)]
    requests = [new(slot, ids, [[slot + 1], []]) for slot, ids in enumerate(tokens)]
    apply(table, new_requests=requests)
    apply(table, new_blocks=[NewBlocks(slot, [[7, 8], [slot]]) for slot in range(1, 4)])
    for slot, ids in enumerate(tokens):
        assert table.all_token_ids[slot].tolist() == ids + [0] * (40 - len(ids))
        expected = [slot + 1, 7, 8] if slot else [1, 0, 0]
        assert table.block_tables[0][slot, :3].tolist() == expected
        assert table.num_blocks[:, slot].tolist() == ([3, 1] if slot else [1, 0])


def test_every_array_is_reset_when_a_slot_is_used_again() -> None:
    table = make_table()
    fresh = make_table()
    apply(
        table,
        new_requests=[
            new(1, list(range(16)), [[1] * 8, [2] * 4], temperature=0.9, frequency_penalty=1.0)
        ],
    )
    for tensor, dim, _ in table.per_slot_tensors():  # what a life leaves behind
        tensor.index_fill_(dim, torch.tensor([1]), 3)
    request = new(1, [4, 5], [[6], []])
    apply(table, freed_slots=[1], new_requests=[request])
    apply(fresh, new_requests=[request])
    owned = {id(tensor) for tensor, _, _ in table.per_slot_tensors()}
    assert owned >= {id(array) for array in table._writes.arrays}
    for name, value in vars(table).items():
        if isinstance(value, torch.Tensor):
            assert value.equal(getattr(fresh, name)), name
            views = value._base is not None  # the scalars and sampling parameters
            assert views or id(value) in owned, f"{name} is not among per_slot_tensors"
    for left, right in zip(table.block_tables, fresh.block_tables, strict=True):
        assert left.equal(right)
    assert table.sampling.features([1]) == fresh.sampling.features([1])


@pytest.mark.parametrize(
    ("options", "cap"),
    [
        ({}, DRAFTS),
        ({"speculative_max_tokens": 2}, 2),
        ({"speculative_max_tokens": 8}, DRAFTS),
        ({"speculative_max_tokens": 0}, 0),
        ({"speculative_enabled": False, "speculative_max_tokens": 2}, 0),
    ],
)
def test_cap_on_drafts(options: dict[str, Any], cap: int) -> None:
    table = make_table()
    apply(table, new_requests=[new(0, [1], [[1], [1]], **options)])
    assert table.max_drafts[0] == cap


def test_penalties_count_what_was_output_before_preemption() -> None:
    table = make_table()
    tokens = [3, 4, 5, 5, 6]
    apply(table, new_requests=[new(0, tokens, [[1], [1]], prompt_len=2, presence_penalty=1.0)])
    counts = table.sampling.output_bin_counts
    assert counts is not None
    assert counts[0].nonzero().flatten().tolist() == [5, 6]
    assert counts[0, 5] == 2


@given(st.data())
def test_block_tables_follow_lists(data: st.DataObject) -> None:
    table = make_table()
    lists: dict[int, list[list[int]]] = {}
    for step in range(8):
        freed = data.draw(st.lists(st.sampled_from(sorted(lists)), unique=True)) if lists else []
        for slot in freed:
            del lists[slot]
        started = data.draw(
            st.lists(st.sampled_from([s for s in range(SLOTS) if s not in lists]), unique=True)
            if len(lists) < SLOTS
            else st.just([])
        )
        grown = data.draw(st.lists(st.sampled_from(sorted(lists)), unique=True)) if lists else []
        plan = StepPlan(step, freed_slots=freed)
        for slot in [*started, *grown]:
            held = lists.get(slot, [[], []])
            fresh = [
                data.draw(st.lists(st.integers(1, 99), max_size=min(3, width - len(ids))))
                for width, ids in zip(BLOCKS, held, strict=True)
            ]
            lists[slot] = [[*old, *more] for old, more in zip(held, fresh, strict=True)]
            if slot in started:
                plan.new_requests.append(new(slot, [1, 2], fresh))
            else:
                plan.new_blocks.append(NewBlocks(slot, fresh))
        table.stage(plan)
        table.apply_staged()
        for slot, groups in lists.items():
            for group, ids in enumerate(groups):
                assert table.num_blocks[group, slot] == len(ids)
                row = table.block_tables[group][slot].tolist()
                assert row == ids + [0] * (BLOCKS[group] - len(ids))


def test_writes_beyond_a_row_are_refused() -> None:
    table = make_table()
    with pytest.raises(AssertionError):
        apply(table, new_requests=[new(0, list(range(MAX_LEN + 1)), [[1], [1]])])
    with pytest.raises(AssertionError):
        apply(make_table(), new_requests=[new(0, [1], [[1] * 9, []])])


def test_parameters_that_cannot_be_stored_affect_only_their_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = make_table()
    write = table.sampling.biases.set

    def fail(slot: int, columns: np.ndarray) -> None:
        if columns.shape[1] == 2:
            raise MemoryError("too much")
        write(slot, columns)

    monkeypatch.setattr(table.sampling.biases, "set", fail)
    good, bad = {3: 1.0}, {3: 1.0, 4: 2.0}
    table.stage(
        StepPlan(0, new_requests=[
            new(0, [1], [[1], [1]], logit_bias=good),
            new(1, [2], [[2], [2]], logit_bias=bad, min_tokens=3, stop_token_ids=[1]),
            new(2, [3], [[3], [3]], logit_bias=good),
        ])
    )  # fmt: skip
    assert table.apply_staged() == {1: "The request's parameters cannot be stored (MemoryError)."}
    assert table.sampling.biases.length[:3].tolist() == [1, 0, 1]
    assert table.sampling.features([1]) == 0 and table.sampling.stop_ids.is_empty
    assert table.all_token_ids[:3, 0].tolist() == [1, 2, 3]
