"""A drafter's decodes: positions and lengths advance, and KV slots follow."""

from __future__ import annotations

import torch

from slipstream.kernels.drafts.prepare_draft import advance_draft_decode, map_draft_slots


def test_decodes_advance_and_stop_at_the_last_position() -> None:
    positions, seq_lens = torch.tensor([8, 2, 0]), torch.tensor([9, 3, 0]).int()
    advance_draft_decode(positions, seq_lens, max_model_len=10)
    assert positions.tolist() == [9, 3, 0] and seq_lens.tolist() == [10, 4, 0]
    advance_draft_decode(positions, seq_lens, max_model_len=10)
    assert positions.tolist() == [9, 4, 0] and seq_lens.tolist() == [10, 5, 0]


def test_a_request_at_the_last_position_writes_no_kv() -> None:
    """The last position already has the KV of its own token, which must not be overwritten."""
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
    # with two tokens per block, position 5 is in the null block and 11 beyond the table
    assert out.tolist() == [[13, 39, -1, -1], [-1, -1, -1, -1]]
