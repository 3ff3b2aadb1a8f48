"""Lists of different lengths in one array: their contents, and that the array's size follows their
sum."""

from __future__ import annotations

import random

import numpy as np
import torch

from slipstream.runner.batch.ragged_rows import RaggedRows

CPU = torch.device("cpu")


def check(rows: RaggedRows, lists: dict[int, np.ndarray], slots: list[int]) -> None:
    width = rows.longest(slots)
    assert width == max(1, *(lists[slot].shape[1] for slot in slots))
    entries, exists = rows.padded(torch.tensor(slots), width)
    assert entries.shape == (2, len(slots), width) and exists.shape == (len(slots), width)
    for index, slot in enumerate(slots):
        held = lists[slot]
        assert exists[index].sum() == held.shape[1] == rows.length[slot]
        assert entries[:, index, : held.shape[1]].tolist() == held.tolist()
        assert (entries[:, index, held.shape[1] :] == -1).all()


def test_lists_stay_as_they_were_set_whatever_happens_to_others() -> None:
    chance = random.Random(3)
    rows = RaggedRows(12, 2, CPU)
    lists = {slot: np.zeros((2, 0), dtype=np.int32) for slot in range(12)}
    for _ in range(600):
        slot = chance.randrange(12)
        length = 0 if chance.random() < 0.4 else chance.choice((1, 3, 40, 700))
        if length:
            lists[slot] = np.random.default_rng(length).integers(0, 99, (2, length), np.int32)
            rows.set(slot, lists[slot])
        else:
            lists[slot] = np.zeros((2, 0), dtype=np.int32)
            rows.clear(slot)
        live = sum(held.shape[1] for held in lists.values())
        assert rows.is_empty == (live == 0)
        assert rows.max_length == max(held.shape[1] for held in lists.values())
        assert rows.entries.shape[1] <= max(256, 8 * live), "the array does not follow the lists"
        check(rows, lists, chance.choices(range(12), k=5))


def test_one_long_list_costs_its_own_length_once() -> None:
    rows = RaggedRows(1024, 3, CPU)
    for slot in range(1024):
        rows.set(slot, np.full((3, 2), slot, dtype=np.int32))
    rows.set(7, np.ones((3, 50_000), dtype=np.int32))
    assert rows.entries.numel() <= 3 * 4 * (50_000 + 2 * 1024)
    rows.clear(7)
    assert rows.entries.numel() <= 3 * 8 * 2 * 1024, "the array never becomes smaller again"
    (slots, _, _), _ = rows.padded(torch.arange(1024), 1)
    assert slots[:, 0].tolist() == [*range(7), -1, *range(8, 1024)]
