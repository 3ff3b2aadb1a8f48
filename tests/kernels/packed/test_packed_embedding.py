"""Rows of quantised tables equal those of their numbers."""

from __future__ import annotations

import pytest
import torch

from slipstream.kernels.packed.embedding import packed_embedding
from slipstream.kernels.quant.tiled import tile

from ...cases import some
from ..quant.random_weights import FORMATS, random_weight

pytestmark = pytest.mark.usefixtures("triton_interpreter")


@pytest.mark.parametrize("name", some(FORMATS, ["int8 16", "int4 32 offsets"]))
@pytest.mark.parametrize("triton", ["0", "1"])
def test_rows_are_exact(name: str, triton: str, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, ids = random_weight(name, 11, 328), torch.tensor([10, 0, 10, 3], dtype=torch.int32)
    monkeypatch.setenv("SLIPSTREAM_TRITON", triton)
    for table in (packed, tile(packed)):
        rows = packed_embedding(ids, table, torch.float16)
        assert torch.equal(rows, packed.dequantise(torch.float16)[ids.long()])
