"""Triton's gated delta kernels, interpreted, equal the references: outputs, states and logs."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from slipstream.kernels.recurrent.rows import DeltaShape, OutputGate

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


@pytest.mark.parametrize(("log", "dtype"), [(0, torch.float32), (3, torch.float16)])
def test_outputs_are_normed_and_gated(log: int, dtype: torch.dtype) -> None:
    """In steps of short rows, and of long ones; what is padding becomes 0, and states stay."""
    from slipstream.kernels.recurrent.triton.gated_delta import gated_delta, prepare_rows

    shape = DeltaShape(1, 3, 8, 24, 4)
    generator = torch.Generator().manual_seed(log)
    x = torch.randn(80, shape.channels, generator=generator).to(dtype)
    wide = torch.randn(80, shape.value_size + 9, generator=generator).to(dtype)
    weight = torch.rand(24, generator=generator) + 0.5
    plain = Slots.make(3, log, shape, dtype)
    triton = Slots.make(3, log, shape, dtype, prepare=prepare_rows, kernel=gated_delta)
    tolerance = 1e-4 if dtype is torch.float32 else 3e-2
    for rows in ([(0, 0, 2), (2, 0, 66)], [(2, 66, 1), (0, 2, 1)]):
        count = sum(tokens for *_, tokens in rows)
        own = OutputGate(wide[: count + 3, 4:-5], weight, 1e-6)
        expected, got = (
            slots.kernel(x[: count + 3], slots.weights, shape, slots.state, slots.rows(rows), own)
            for slots in (plain, triton)
        )
        torch.testing.assert_close(got[:count], expected[:count], atol=tolerance, rtol=tolerance)
        assert got.is_contiguous() and not got[count:].any()
        known = plain.table.values[0] > 0  # slots whose states are read
        torch.testing.assert_close(
            triton.state.state[known], plain.state.state[known], atol=tolerance, rtol=tolerance
        )


@pytest.mark.parametrize(
    ("order", "log"),
    some([(order, log) for order in (0, 1, 2) for log in (0, 3)], kept=[(0, 3), (1, 0), (2, 3)]),
)
def test_plans_of_a_step_compute_the_same(
    order: int, log: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orders of programs, narrower tiles, tokens at once, states that are marked as read once, and
    weights of the convolution that are stored tap by tap."""
    from slipstream.kernels.recurrent.triton import delta_step
    from slipstream.kernels.recurrent.triton.gated_delta import gated_delta, prepare_rows

    shape = DeltaShape(1, 2, 12, 24, 4)
    text = torch.randn(2, 6, shape.channels, generator=torch.Generator().manual_seed(log))
    monkeypatch.setattr(
        delta_step,
        "plan_step",
        lambda num_rows, log: delta_step.StepPlan(16, 1, None, order > 0, order, streams=order > 0),
    )
    plain = Slots.make(3, log, shape)
    triton = Slots.make(3, log, shape, prepare=prepare_rows, kernel=gated_delta)
    taps = triton.weights.conv.t().contiguous()
    triton.weights = replace(triton.weights, conv=taps.t())
    steps = random_steps(text, [2, 0], log, random.Random(1), [1, 2, 3] if log else [1])
    for (x, rows, padding), _ in steps:
        expected, got = (slots.run(x, rows, padding) for slots in (plain, triton))
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
        known = plain.table.values[0] > 0  # slots whose states are read
        torch.testing.assert_close(
            triton.state.state[known], plain.state.state[known], atol=1e-4, rtol=1e-4
        )
