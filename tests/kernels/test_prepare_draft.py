"""A drafter's inputs: the worked example of one accepted draft, prefill chunks and padding."""

from __future__ import annotations

import torch

from slipstream.kernels.prepare_draft import (
    advance_draft_decode,
    map_draft_slots,
    shift_draft_ids,
    start_draft_decode,
)


def test_ids_shift_within_each_request_and_padding_is_filled() -> None:
    # Row 0 verifies three drafts from position 7 and accepts one; row 1 is a chunk at 0..2.
    input_ids = torch.tensor([7, 8, 9, 10, 40, 41, 42, 99, 99], dtype=torch.int32)
    query_start_loc = torch.tensor([0, 4, 7, 7], dtype=torch.int32)
    idx_mapping = torch.tensor([2, 0, -1], dtype=torch.int32)
    num_sampled = torch.tensor([2, 0], dtype=torch.int32)
    num_rejected = torch.tensor([2, 0], dtype=torch.int32)
    ids, last = torch.full((9,), 77, dtype=torch.int32), torch.full((3,), 77)
    shift_draft_ids(
        input_ids,
        query_start_loc,
        idx_mapping,
        num_sampled,
        num_rejected,
        torch.tensor([0, 0, 50]),  # newest token by slot
        torch.tensor([43, 0, 0]),  # next prompt token by slot
        ids,
        last,
        num_tokens=7,
        num_reqs_padded=3,
        num_tokens_padded=9,
    )
    assert ids.tolist() == [8, 50, 0, 0, 41, 42, 43, 0, 0]
    assert last.tolist() == [1, 6, 0]

    positions, seq_lens = torch.full((3,), 77), torch.full((3,), 77, dtype=torch.int32)
    start_draft_decode(
        torch.tensor([7, 8, 9, 10, 0, 1, 2]),
        torch.tensor([11, 3], dtype=torch.int32),
        num_rejected,
        last,
        positions,
        seq_lens,
        num_reqs_padded=3,
    )
    assert positions.tolist() == [8, 2, 0] and seq_lens.tolist() == [9, 3, 0]
    advance_draft_decode(positions, seq_lens, max_model_len=10)
    assert positions.tolist() == [9, 3, 0] and seq_lens.tolist() == [10, 4, 0]
    advance_draft_decode(positions, seq_lens, max_model_len=10)
    assert positions.tolist() == [9, 4, 0] and seq_lens.tolist() == [10, 5, 0]


def test_a_request_at_the_last_position_writes_no_kv() -> None:
    """The last known position holds the KV of the token that stands there (trap 17)."""
    positions, seq_lens = torch.tensor([8, 9, 20, 0]), torch.tensor([9, 10, 10, 0]).int()
    writes = torch.full((4,), 77)
    advance_draft_decode(positions, seq_lens, 10, writes)
    assert positions.tolist() == [9, 9, 9, 0] and seq_lens.tolist() == [10, 10, 10, 0]
    assert writes.tolist() == [9, -1, -1, -1]
    advance_draft_decode(positions, seq_lens, 10, writes)
    assert writes.tolist() == [-1, -1, -1, -1]


def test_slots_of_draft_decodes() -> None:
    tables = [torch.tensor([[5, 3, 0], [7, 8, 9], [1, 1, 1], [2, 2, 2]]).int()] * 2
    writes, seq_lens = torch.tensor([5, 11, -1, 2]), torch.tensor([6, 12, 4, 0]).int()
    out = torch.full((2, 4), 77)
    map_draft_slots(tables, [4, 2], seq_lens, writes, out)
    # of two tokens a block, position 5 is in the null block and 11 beyond the table
    assert out.tolist() == [[13, 39, -1, -1], [-1, -1, -1, -1]]
