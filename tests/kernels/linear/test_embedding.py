"""Gathering rows of a table, interpreted, equals torch."""

from __future__ import annotations

import pytest
import torch

from slipstream.kernels.linear.embedding import embedding


@pytest.mark.usefixtures("triton_interpreter")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("size", [24, 1500])
def test_rows_of_a_table(size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_TRITON", "1")
    table = torch.randn(11, size).to(dtype)
    for kind in (torch.int32, torch.int64):
        ids = torch.randint(0, 11, (7,), dtype=kind)
        assert torch.equal(embedding(ids, table), table[ids.long()])
        assert embedding(ids[:0], table).shape == (0, size)
    grid = torch.randint(0, 11, (2, 3))
    assert torch.equal(embedding(grid, table), table[grid])


@pytest.mark.usefixtures("triton_interpreter")
def test_rows_that_lie_apart() -> None:
    from slipstream.kernels.linear.triton.embedding import embedding

    x, rows = torch.randn(7, 60)[:, :37], torch.tensor([6, 0, 6])
    assert torch.equal(embedding(rows, x), x[rows])
