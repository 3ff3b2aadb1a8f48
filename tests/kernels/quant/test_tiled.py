"""Tiled weights hold the same numbers as the packed weights that they are made of."""

from __future__ import annotations

import pytest
import torch

from slipstream.kernels.quant import tiled

from .random_weights import FORMATS, random_weight


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(1, 2), (5, 129), (131, 640)], ids=str)
def test_tiling_keeps_every_number(
    name: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiled, "_PIECE_VALUES", 4000)  # several pieces
    weight = random_weight(name, *shape)
    if weight.offsets is not None and weight.group >= weight.columns and weight.high is None:
        assert not tiled.can_tile(weight)
        return
    assert tiled.can_tile(weight)
    made = tiled.tile(weight)
    assert made.shape == weight.shape and made.words.is_contiguous()
    back = made.packed()
    if weight.high is None:  # which keeps the bits that belong to no column
        assert torch.equal(back.values.view(torch.uint8), weight.values.view(torch.uint8))
    exact = weight.dequantise()
    assert torch.equal(made.dequantise(), exact)
    ids = torch.tensor([shape[0] - 1, 0, shape[0] // 2], dtype=torch.int32)
    assert torch.equal(made.rows(ids), exact[ids.long()])
    few = shape[0] // 2 + 1
    assert torch.equal(made.first_rows(few).dequantise(), exact[:few])
    assert made.nbytes == sum(tensor.nbytes for tensor in made.tensors)


def test_a_word_holds_the_same_column_of_each_slice() -> None:
    weight = random_weight("int4 128", 2, 512)
    codes = torch.stack((weight.values & 15, weight.values >> 4), -1).flatten(1).int()
    words = tiled.tile(weight).words.int() & 0xFFFF
    for span in (0, 1):
        for index in range(4):
            start = 256 * span + 64 * index
            found = words[:, 64 * span : 64 * span + 64] >> 4 * index & 15
            assert torch.equal(found, codes[:, start : start + 64])
