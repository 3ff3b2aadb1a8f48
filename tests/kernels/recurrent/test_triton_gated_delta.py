"""Triton's gated delta kernels, interpreted, equal the references: outputs, states and logs."""

from __future__ import annotations

import random

import pytest
import torch

from slipstream.kernels.recurrent.gated_norm import gated_norm_reference
from slipstream.kernels.recurrent.rows import DeltaShape

from ...cases import some
from .delta_slots import Slots, random_steps

pytestmark = pytest.mark.usefixtures("triton_interpreter")
SMALL = DeltaShape(1, 2, 8, 16, 4)
WIDE = DeltaShape(1, 1, 24, 40, 4)  # no powers of two, and two tiles of values


@pytest.mark.parametrize(
    ("log", "shape", "dtype"),
    some(
        [
            (log, shape, dtype)
            for log in (0, 1, 3)
            for shape in (SMALL, WIDE)
            for dtype in (torch.float32, torch.float16)
        ],
        kept=[(0, SMALL, torch.float16), (3, WIDE, torch.float32)],
    ),
)
def test_steps_leave_the_states_of_the_reference(
    log: int, shape: DeltaShape, dtype: torch.dtype
) -> None:
    """Padded rows, rejected tokens, long rows of one chunk and more, and saved states."""
    from slipstream.kernels.recurrent.triton.gated_delta import gated_delta, prepare_rows

    generator = torch.Generator().manual_seed(log)
    text = torch.randn(2, 69, shape.channels, generator=generator).to(dtype)
    plain = Slots.make(4, log, shape, dtype)
    triton = Slots.make(4, log, shape, dtype, prepare=prepare_rows, kernel=gated_delta)
    steps = random_steps(text, [2, 0], log, random.Random(log), [1, 66, 3] if log else [1, 66])
    tolerance = 1e-4 if dtype is torch.float32 else 3e-2
    for index, ((x, rows, padding), _) in enumerate(steps):
        for slots in (plain, triton):
            for slot, at, count in rows:  # a border in this row, or in the log of the next
                border = at + count if count > log else at + 1
                slots.table.values[1:, slot] = torch.tensor([border, slot + 1])
        wide = torch.cat((x, torch.ones(x.shape[0], 5, dtype=dtype)), dim=1)
        expected = plain.run(x, rows, padding)
        got = triton.run(wide[:, : x.shape[1]], rows, padding)
        close = {"atol": tolerance, "rtol": tolerance, "msg": f"step {index}: {rows}"}
        torch.testing.assert_close(got, expected, **close)
        assert torch.equal(triton.table.values[:, :-1], plain.table.values[:, :-1])
        known = (plain.table.values[0, :-1] > 0).nonzero()[:, 0]  # slots whose states are read
        for one, other in zip(*(vars(s.state).values() for s in (triton, plain)), strict=True):
            chosen = known if one.shape[0] == 5 else slice(1, None)  # block 0 is nobody's
            torch.testing.assert_close(one[chosen][:, :3], other[chosen][:, :3], **close)
    assert plain.state.snapshots[1].any() and plain.state.snapshots[3].any()
    assert bool((triton.state.state[-1] == 9).all())  # padded rows write nothing at all


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_norm_is_gated(dtype: torch.dtype) -> None:
    from slipstream.kernels.recurrent.triton.gated_norm import gated_norm

    x, weight = torch.randn(3, 4, 24).to(dtype), torch.randn(24)
    gate = torch.randn(3, 200).to(dtype)[:, 7:103].view(3, 4, 24)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(
        gated_norm(x, gate, weight, 1e-6), gated_norm_reference(x, gate, weight, 1e-6),
        atol=tolerance, rtol=tolerance,
    )  # fmt: skip
