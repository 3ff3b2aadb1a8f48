"""Drafts are drawn as by `gumbel_sample`, and q is stored only for rows that draw."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from slipstream.kernels import operation
from slipstream.kernels.drafts import draw_drafts as kernels
from slipstream.kernels.sampling.sample import DRAFT, gumbel_sample_reference

from ...cases import some

SLOTS, MAX_REQS, K, VOCAB, POISON = 7, 6, 3, 2500, 77
LIVE = {0: 5, 1: 0, 2: 3, 3: 6}  # batch row -> slot; later rows are padded
HEAT = (1.7, 0.0, 1.3, 0.3, 0.9, 0.0)  # padded rows may have any value


@pytest.fixture(params=["torch", "triton"], autouse=True)
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test with the references, and with interpreted Triton kernels."""
    triton = request.param == "triton"
    if triton:
        request.getfixturevalue("triton_interpreter")
    for module in (kernels, operation):
        monkeypatch.setattr(module, "use_triton", lambda tensor: triton)


def drafter() -> SimpleNamespace:
    idx_mapping = torch.full((MAX_REQS,), -1, dtype=torch.int32)
    idx_mapping[list(LIVE)] = torch.tensor(list(LIVE.values()), dtype=torch.int32)
    return SimpleNamespace(
        idx_mapping=idx_mapping,
        temperature=torch.tensor(HEAT),
        seed=torch.randint(-(2**62), 2**62, (MAX_REQS,)),
        noise_positions=torch.randint(0, 5000, (MAX_REQS,)),
        step=torch.zeros(MAX_REQS, dtype=torch.int64),
        draft_tokens=torch.full((MAX_REQS, K), POISON),
        decode_ids=torch.full((MAX_REQS,), POISON, dtype=torch.int32),
    )


def drawn(of: SimpleNamespace, logits: Tensor) -> tuple[Tensor, Tensor]:
    """The definition of a draft: (scaled logits, ids)."""
    rows = logits.shape[0]
    heat, greedy = of.temperature[:rows], of.temperature[:rows] <= 0
    scaled = logits.float() / torch.where(greedy, 1.0, heat)[:, None]
    keys = (of.seed[:rows], of.noise_positions[:rows])
    return scaled, gumbel_sample_reference(scaled, *keys, DRAFT, greedy)


@pytest.mark.parametrize(
    ("rows", "mapped", "dtype"),
    some(
        itertools.product((1, 3, MAX_REQS), (True, False), (torch.bfloat16, torch.float32)),
        kept=[
            *[(MAX_REQS, True, torch.bfloat16), (3, False, torch.bfloat16)],
            *[(MAX_REQS, False, torch.float32), (1, True, torch.float32)],
        ],
    ),
)
def test_k_drafts_and_what_they_were_drawn_from(
    rows: int, mapped: bool, dtype: torch.dtype
) -> None:
    torch.manual_seed(rows)
    size = 1100  # more than a block, but not a multiple
    to_target = torch.randperm(VOCAB)[:size] if mapped else None
    places = torch.arange(size) if to_target is None else to_target
    of, kept = drafter(), torch.full((SLOTS, K, VOCAB), float("-inf"))
    expected, before = kept.clone(), of.noise_positions.clone()
    num_drawn = 0
    for step in range(K):
        logits = (torch.randn(rows, size) * 2).to(dtype)
        scaled, ids = drawn(of, logits)
        num_drawn += int((ids != logits.argmax(-1)).sum())
        kernels.draw_drafts(logits, of, to_target, kept)
        for row, slot in LIVE.items():
            if row < rows and HEAT[row] > 0:
                expected[slot, step, places] = scaled[row]
        assert of.draft_tokens[:rows, step].equal(places[ids])
        assert of.decode_ids[:rows].equal(places[ids].int())
    assert kept.equal(expected)  # and -inf elsewhere: greedy and padded rows keep nothing
    assert num_drawn >= K - 1
    assert of.step.tolist() == [K] * rows + [0] * (MAX_REQS - rows)
    assert (of.noise_positions - before).equal(of.step)
    assert (of.draft_tokens[rows:] == POISON).all() and (of.decode_ids[rows:] == POISON).all()


def test_logits_with_their_rows_apart_and_slots_that_held_others() -> None:
    """Only the entries of a row's own ids are written, whatever their neighbours hold."""
    torch.manual_seed(1)
    to_target = torch.randperm(VOCAB)[:600]
    of, kept = drafter(), torch.full((SLOTS, K, VOCAB), float(POISON))
    of.step[:] = torch.tensor([2, 0, 1, 0, 0, 0])  # each row has its own
    logits = torch.randn(MAX_REQS, 700)[:, :600]
    scaled, ids = drawn(of, logits)
    kernels.draw_drafts(logits, of, to_target, kept)
    expected = torch.full_like(kept, POISON)
    for row, step in ((0, 2), (2, 1), (3, 0)):
        expected[LIVE[row], step, to_target] = scaled[row]
        assert of.draft_tokens[row, step] == to_target[ids[row]]
    assert kept.equal(expected)


def test_ids_beyond_the_targets_vocabulary_are_never_drawn() -> None:
    torch.manual_seed(2)
    of, kept = drafter(), torch.full((SLOTS, K, 500), float("-inf"))
    logits = torch.randn(MAX_REQS, 600)
    logits[:, 500:] += 50.0
    scaled, ids = drawn(of, logits[:, :500])
    kernels.draw_drafts(logits, of, None, kept)
    assert of.draft_tokens[:, 0].equal(ids)
    assert kept[LIVE[2], 0].equal(scaled[2])


def test_a_draft_too_many_is_not_kept() -> None:
    """Replaying a captured step beyond the buffers' last draft changes no other rows."""
    torch.manual_seed(4)
    of, kept = drafter(), torch.full((SLOTS, K, 700), float("-inf"))
    of.step[:] = K
    logits = torch.randn(MAX_REQS, 700)
    _, ids = drawn(of, logits)
    kernels.draw_drafts(logits, of, None, kept)
    assert (kept == float("-inf")).all() and (of.draft_tokens == POISON).all()
    assert of.decode_ids.equal(ids.int())


@pytest.mark.parametrize("mapped", [True, False])
@pytest.mark.parametrize("rows", [1, MAX_REQS])
def test_the_likeliest_tokens_and_given_ones(rows: int, mapped: bool) -> None:
    torch.manual_seed(3)
    to_target = torch.randperm(VOCAB)[:1100] if mapped else None
    found = []
    of, other = drafter(), drafter()
    start = of.noise_positions.clone()
    for step in range(2):
        logits = torch.randn(rows, 1100).bfloat16()  # with ties
        ids = logits.argmax(-1)
        kernels.draw_drafts(logits, of, to_target, None)
        kernels.take_drafts(ids, other, to_target)
        found.append(ids if to_target is None else to_target[ids])
        for each in (of, other):
            assert each.draft_tokens[:rows, : step + 1].equal(torch.stack(found, 1))
            assert each.decode_ids[:rows].equal(found[-1].int())
            assert each.step.tolist() == [step + 1] * rows + [0] * (MAX_REQS - rows)
            assert (each.draft_tokens[rows:] == POISON).all()
            assert (each.draft_tokens[:, step + 1 :] == POISON).all()
    assert (of.noise_positions - start).equal(of.step)


def test_none_is_the_best_of_a_row_of_minus_infinity() -> None:
    """Dry and padded steps have such rows; they must still get an id of the vocabulary."""
    of, kept = drafter(), torch.full((SLOTS, K, VOCAB), float("-inf"))
    kernels.draw_drafts(torch.full((MAX_REQS, 1100), float("-inf")), of, None, kept)
    assert ((of.draft_tokens[:, 0] >= 0) & (of.draft_tokens[:, 0] < 1100)).all()
