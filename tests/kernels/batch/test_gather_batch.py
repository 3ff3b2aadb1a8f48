"""The batch kernels equal plain Python lists, and obey every padding rule of a step."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

from slipstream.kernels.batch.gather_batch import (
    compute_slot_mappings,
    gather_block_tables,
    post_update,
    post_update_reference,
    prepare_inputs,
    prepare_inputs_reference,
)
from slipstream.kernels.batch.step_sizes import StepSizes

from ..step_buffers import sampled_tokens

SLOTS, MAX_LEN, DRAFTS, MAX_REQS, MAX_TOKENS, VOCAB = 6, 40, 3, 6, 64, 50
UPDATES = pytest.mark.parametrize("update", [post_update, post_update_reference])


@dataclass
class Row:
    """One request as lists."""

    slot: int
    tokens: list[int]
    prefill_len: int
    computed: int
    drafts: list[int] = field(default_factory=list)
    query_len: int = 1


def make_requests(rows: list[Row]) -> SimpleNamespace:
    table = SimpleNamespace(
        all_token_ids=torch.randint(0, VOCAB, (SLOTS, MAX_LEN), dtype=torch.int32),
        prefill_len=torch.zeros(SLOTS, dtype=torch.int32),
        total_len=torch.zeros(SLOTS, dtype=torch.int32),
        num_computed_tokens=torch.zeros(SLOTS, dtype=torch.int32),
        last_sampled_tokens=torch.zeros(SLOTS, dtype=torch.int64),
        next_prefill_tokens=torch.full((SLOTS,), -7, dtype=torch.int64),
        draft_tokens=torch.full((SLOTS, DRAFTS), -1, dtype=torch.int64),
    )
    for row in rows:
        table.all_token_ids[row.slot, : len(row.tokens)] = torch.tensor(row.tokens).int()
        table.prefill_len[row.slot] = row.prefill_len
        table.total_len[row.slot] = len(row.tokens)
        table.num_computed_tokens[row.slot] = row.computed
        table.last_sampled_tokens[row.slot] = row.tokens[-1]
        if row.drafts:
            table.draft_tokens[row.slot, : len(row.drafts)] = torch.tensor(row.drafts)
    return table


def batch_rows(slots: list[int], starts: list[int]) -> SimpleNamespace:
    return SimpleNamespace(
        idx_mapping=torch.tensor(slots, dtype=torch.int32),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
    )


def make_batch(rows: list[Row]) -> SimpleNamespace:
    """Buffers with arbitrary valid values, and the three series that the host fills."""

    def garbage(size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randint(0, 2 if dtype is torch.bool else 30, (size,)).to(dtype)

    batch = SimpleNamespace(
        idx_mapping=torch.full((MAX_REQS,), -1, dtype=torch.int32),
        query_start_loc=torch.zeros(MAX_REQS + 1, dtype=torch.int32),
        cu_num_logits=torch.zeros(MAX_REQS + 1, dtype=torch.int32),
        seq_lens=garbage(MAX_REQS, torch.int32),
        num_draft_tokens=garbage(MAX_REQS, torch.int32),
        input_ids=garbage(MAX_TOKENS, torch.int32),
        positions=garbage(MAX_TOKENS, torch.int64),
        logits_indices=garbage(MAX_TOKENS, torch.int64),
        expanded_idx_mapping=garbage(MAX_TOKENS, torch.int32),
        expanded_local_pos=garbage(MAX_TOKENS, torch.int32),
        draft_ids=garbage(MAX_TOKENS, torch.int64),
        logits_positions=garbage(MAX_TOKENS, torch.int64),
    )
    for index, row in enumerate(rows):
        batch.idx_mapping[index] = row.slot
        batch.query_start_loc[index + 1 :] = batch.query_start_loc[index] + row.query_len
        batch.cu_num_logits[index + 1 :] = batch.cu_num_logits[index] + len(row.drafts) + 1
    return batch


def random_rows(rng: random.Random) -> list[Row]:
    rows = []
    for slot in rng.sample(range(SLOTS), rng.randint(1, MAX_REQS)):
        tokens = [rng.randrange(VOCAB) for _ in range(rng.randint(2, 20))]
        if rng.random() < 0.4:  # prefill, finished by this step or not
            computed = rng.randrange(len(tokens))
            query_len = min(rng.randint(1, 8), len(tokens) - computed)
            rows.append(Row(slot, tokens, len(tokens), computed, query_len=query_len))
        else:
            drafts = [rng.randrange(-1, VOCAB) for _ in range(rng.randint(0, DRAFTS))]
            prefill_len, computed = rng.randint(1, len(tokens) - 1), len(tokens) - 1
            rows.append(Row(slot, tokens, prefill_len, computed, drafts, len(drafts) + 1))
    return rows


@pytest.mark.parametrize("prepare", [prepare_inputs, prepare_inputs_reference])
@pytest.mark.parametrize("seed", range(30))
def test_prepare_inputs_equals_lists(seed: int, prepare: Callable[..., None]) -> None:
    rng = random.Random(seed)
    rows = random_rows(rng)
    requests, batch = make_requests(rows), make_batch(rows)
    num_reqs, num_tokens = len(rows), sum(row.query_len for row in rows)
    num_logits = sum(len(row.drafts) + 1 for row in rows)
    tokens_padded = num_tokens + rng.randint(0, 5)
    sizes = StepSizes(num_reqs, num_tokens, num_logits, MAX_REQS, tokens_padded)
    prepare(requests, batch, sizes)

    ids: list[int] = []
    positions: list[int] = []
    logits: list[tuple[int, int, int, int, int]] = []  # token row, slot, local, draft, position
    for row in rows:
        known = row.tokens + [max(draft, 0) for draft in row.drafts]
        span = range(row.computed, row.computed + row.query_len)
        first = len(ids) + row.query_len - len(row.drafts) - 1
        for local, judged in enumerate([*row.drafts, -1]):
            at = first + local
            position = row.computed + at - len(ids)
            logits.append((at, row.slot, local, judged, position))
        ids += [known[position] for position in span]
        positions += span
    assert batch.input_ids[:num_tokens].tolist() == ids
    assert batch.positions[:num_tokens].tolist() == positions
    columns = ("logits_indices", "expanded_idx_mapping", "expanded_local_pos")
    found = [getattr(batch, name)[:num_logits].tolist() for name in columns]
    found += [batch.draft_ids[:num_logits].tolist(), batch.logits_positions[:num_logits].tolist()]
    assert list(zip(*found, strict=True)) == logits
    seq_lens = [row.computed + row.query_len for row in rows]
    assert batch.seq_lens.tolist() == seq_lens + [0] * (MAX_REQS - num_reqs)
    drafts = [sum(draft >= 0 for draft in row.drafts) for row in rows]
    assert batch.num_draft_tokens.tolist() == drafts + [0] * (MAX_REQS - num_reqs)
    for row, seq_len in zip(rows, seq_lens, strict=True):
        follows = row.tokens[seq_len] if seq_len < row.prefill_len else -7
        assert requests.next_prefill_tokens[row.slot] == follows
    assert not batch.input_ids[num_tokens:tokens_padded].any()
    assert not batch.positions[num_tokens:tokens_padded].any()


def test_padded_rows_get_the_null_block_and_slot_minus_one() -> None:
    tables = [
        torch.arange(1, SLOTS * 5 + 1, dtype=torch.int32).reshape(SLOTS, 5),
        torch.arange(1, SLOTS * 3 + 1, dtype=torch.int32).reshape(SLOTS, 3),
    ]
    idx_mapping = torch.tensor([4, 1, -1, -1], dtype=torch.int32)
    out = [torch.full((4, table.shape[1]), 99, dtype=torch.int32) for table in tables]
    gather_block_tables(tables, idx_mapping, out, 2, 4)
    for table, rows in zip(tables, out, strict=True):
        assert rows[:2].equal(table[[4, 1]])
        assert not rows[2:].any()

    out[1][0, 2] = 0  # the null block: nothing may be written there
    query_start_loc = torch.tensor([0, 3, 4, 4, 4], dtype=torch.int32)
    positions = torch.tensor([7, 8, 9, 2, 5, 5], dtype=torch.int64)
    slots = torch.full((2, 8), 123)
    compute_slot_mappings(out, [4, 4], query_start_loc, positions, slots, 2, 4, 6)
    first, second = tables[0][[4, 1]], tables[1][[4, 1]]
    assert slots[0].tolist() == [
        *[int(first[0, p // 4]) * 4 + p % 4 for p in (7, 8, 9)],
        int(first[1, 0]) * 4 + 2,
        *(-1, -1, 123, 123),  # padded to 6; the rest is unused
    ]
    assert slots[1].tolist() == [
        *(int(second[0, 1]) * 4 + 3, -1, -1, int(second[1, 0]) * 4 + 2),
        *(-1, -1, 123, 123),
    ]


def test_positions_beyond_the_table_write_nothing() -> None:
    table, slots = torch.ones((1, 2), dtype=torch.int32), torch.zeros((1, 3), dtype=torch.int64)
    query_start_loc = torch.tensor([0, 3], dtype=torch.int32)
    positions = torch.tensor([6, 7, 8])
    compute_slot_mappings([table], [4], query_start_loc, positions, slots, 1, 3, 3)
    assert slots.tolist() == [[6, 7, -1]]


@UPDATES
def test_post_update_follows_the_worked_example(update: Callable[..., None]) -> None:
    """K = 3, tokens 0..7 known, one of three drafts accepted."""
    row = Row(2, list(range(10, 18)), 4, 7, [1, 2, 3], 4)
    requests, counts = make_requests([row]), torch.zeros((SLOTS, VOCAB), dtype=torch.int32)
    before = requests.all_token_ids.clone()
    update(
        requests,
        batch_rows([2, -1], [0, 4, 4]),
        sampled_tokens(
            torch.tensor([[1, 30, -1, -1], [9, 9, 9, 9]]),
            torch.tensor([2, 4], dtype=torch.int32),
            torch.tensor([2, 0], dtype=torch.int32),
        ),
        counts,
    )
    assert requests.num_computed_tokens.tolist() == [0, 0, 9, 0, 0, 0]
    assert requests.total_len.tolist() == [0, 0, 10, 0, 0, 0]
    assert requests.last_sampled_tokens[2] == 30
    before[2, 8:10] = torch.tensor([1, 30])
    assert requests.all_token_ids.equal(before)  # a padded row writes nothing, not even to slot 0
    assert counts.nonzero().tolist() == [[2, 1], [2, 30]]


@UPDATES
def test_post_update_of_a_prefill_chunk_only_counts_tokens(update: Callable[..., None]) -> None:
    row = Row(0, list(range(20)), 20, 5, query_len=6)
    requests = make_requests([row])
    before = requests.all_token_ids.clone()
    none = torch.zeros(1, dtype=torch.int32)
    ids = torch.full((1, 4), -1)
    update(requests, batch_rows([0], [0, 6]), sampled_tokens(ids, none, none), None)
    assert requests.num_computed_tokens[0] == 11
    assert requests.total_len[0] == 20
    assert requests.last_sampled_tokens[0] == 19
    assert requests.all_token_ids.equal(before)


@UPDATES
def test_post_update_counts_a_repeated_token_twice_and_stops_at_the_table_end(
    update: Callable[..., None],
) -> None:
    row = Row(3, [5] * (MAX_LEN - 1), 4, MAX_LEN - 2, [6, 6, 6], 4)
    requests, counts = make_requests([row]), torch.zeros((SLOTS, VOCAB), dtype=torch.int32)
    update(
        requests,
        batch_rows([3], [0, 4]),
        sampled_tokens(
            torch.tensor([[6, 6, 6, 8]]),
            torch.tensor([4], dtype=torch.int32),
            torch.zeros(1, dtype=torch.int32),
        ),
        counts,
    )
    assert counts[3, 6] == 3 and counts[3, 8] == 1
    assert requests.all_token_ids[3, MAX_LEN - 1] == 6
    assert requests.total_len[3] == MAX_LEN
    assert requests.last_sampled_tokens[3] == 8


@pytest.mark.parametrize("seed", range(20))
def test_the_cpu_version_equals_the_reference_on_whole_steps(seed: int) -> None:
    """It does so near the end of the table, too, where drafts lie beyond it."""
    rng = random.Random(seed)
    rows = random_rows(rng)
    for row in rows:
        if rng.random() < 0.3 and row.prefill_len < len(row.tokens):
            row.tokens = [rng.randrange(VOCAB) for _ in range(MAX_LEN - rng.randint(0, 2))]
            row.computed = len(row.tokens) - 1
    num_reqs, num_tokens = len(rows), sum(row.query_len for row in rows)
    num_logits = sum(len(row.drafts) + 1 for row in rows)
    torch.manual_seed(seed)
    sampled = torch.randint(0, VOCAB, (num_reqs, DRAFTS + 1))
    num_sampled = torch.randint(0, DRAFTS + 2, (num_reqs,)).int()
    num_rejected = torch.randint(0, 2, (num_reqs,)).int()
    sizes = StepSizes(num_reqs, num_tokens, num_logits, MAX_REQS, num_tokens + 3)
    after = []
    for prepare, update in (
        (prepare_inputs, post_update),
        (prepare_inputs_reference, post_update_reference),
    ):
        torch.manual_seed(seed)
        requests, batch = make_requests(rows), make_batch(rows)
        counts = torch.zeros((SLOTS, VOCAB), dtype=torch.int32)
        prepare(requests, batch, sizes)
        batch.idx_mapping[num_reqs // 2] = -1  # a row without a request
        update(requests, batch, sampled_tokens(sampled, num_sampled, num_rejected), counts)
        after.append({**vars(requests), **vars(batch), "counts": counts})
    for name, tensor in after[0].items():
        assert tensor.equal(after[1][name]), name
