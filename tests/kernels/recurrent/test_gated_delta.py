"""The gated delta rule: chunks equal tokens, and logged tokens are absorbed as far as accepted."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from slipstream.kernels.recurrent.gated_delta import Terms, delta_chunks, delta_tokens
from slipstream.kernels.recurrent.gated_norm import gated_norm
from slipstream.kernels.recurrent.rows import DeltaShape, OutputGate

from .delta_slots import SHAPE, Slots, random_steps


def random_terms(tokens: int, generator: torch.Generator) -> Terms:
    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    query, key = (torch.nn.functional.normalize(draw(tokens, 4, 8), dim=-1) for _ in range(2))
    decay = -draw(tokens, 4).exp() * 0.3
    return query, key, draw(tokens, 4, 16), decay, draw(tokens, 4).sigmoid()


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
def test_chunks_equal_tokens(tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    terms, state = random_terms(tokens, generator), torch.randn(4, 8, 16, generator=generator)
    expected, last = delta_tokens(terms, state)
    got, got_last = delta_chunks(terms, state)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(got_last, last, atol=1e-4, rtol=1e-4)


def test_equal_keys_without_decay_stay_exact() -> None:
    """The worst case for the triangular system: every change depends on all before it."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, decay, beta = random_terms(64, generator)
    terms = (query, key[:1].expand(64, -1, -1), value, decay * 0, torch.ones_like(beta))
    state = torch.zeros(4, 8, 16)
    got, expected = delta_chunks(terms, state), delta_tokens(terms, state)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("log", [0, 1, 4])
def test_rows_of_any_length_continue_their_states(log: int) -> None:
    text = torch.randn(2, 90, SHAPE.channels, generator=torch.Generator().manual_seed(log))
    expected = [Slots.make(1, 0).run(one, [(0, 0, 90)]) for one in text]
    slots, where = Slots.make(5, log), [3, 1]
    steps = random_steps(text, where, log, random.Random(log), [1, 1, 2, 3, 4, 5, 17, 66])
    for (x, rows, padding), right in steps:
        out = slots.run(x, rows, padding)
        for (request, at, count), part in zip(
            right, out.split([count for *_, count in rows]), strict=True
        ):
            wanted = expected[request][at : at + count]
            torch.testing.assert_close(part[:count], wanted, atol=1e-4, rtol=1e-4)
    untouched = [slot for slot in range(5) if slot not in where]
    assert bool((slots.state.state[untouched] == 9).all())
    assert bool((slots.state.history[untouched] == 9).all())


@pytest.mark.parametrize("log", [0, 3])
@pytest.mark.parametrize("border", [6, 7, 8, 9, 20])
def test_a_state_is_saved_at_its_border(log: int, border: int) -> None:
    x = torch.randn(20, SHAPE.channels, generator=torch.Generator().manual_seed(1))
    expected = Slots.make(1, 0)
    expected.run(x[:border], [(0, 0, border)])
    slots, at = Slots.make(2, log), 0
    slots.table.values[1:, 1] = torch.tensor([border, 2])
    for count in [6, 1, 1, 1, 11] if not log else [6, 3, 11]:  # 11: absorbed at once
        slots.run(x[at : at + count], [(1, at, count)])
        at += count
    saved, tail = slots.state.snapshots[2], slots.state.snapshot_tails[2]
    torch.testing.assert_close(saved, expected.state.state[0], atol=1e-5, rtol=1e-5)
    assert torch.equal(tail, x[border - 3 : border])
    assert not slots.state.snapshots[3].any()


def test_a_step_without_bulk_rows_can_be_repeated() -> None:
    x = torch.randn(9, SHAPE.channels, generator=torch.Generator().manual_seed(2))
    slots = Slots.make(1, 3)
    slots.run(x[:5], [(0, 0, 5)])
    slots.run(x[5:7], [(0, 5, 2)])
    first = slots.run(x[6:9], [(0, 6, 3)])
    state = slots.state.state.clone()
    assert torch.equal(slots.run(x[6:9], [(0, 6, 3)]), first)
    assert torch.equal(slots.state.state, state)


def test_the_norm_is_gated() -> None:
    x, gate = torch.randn(3, 4, 16), torch.randn(3, 4, 16)
    weight, shape = torch.randn(16), DeltaShape(2, 4, 8, 16, 4)
    expected = torch.nn.functional.rms_norm(x, (16,), weight, 1e-6) * gate * gate.sigmoid()
    got = gated_norm(x.flatten(1), shape, OutputGate(gate.flatten(1), weight, 1e-6))
    torch.testing.assert_close(got, expected.flatten(1))
