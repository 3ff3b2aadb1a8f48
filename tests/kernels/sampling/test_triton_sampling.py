"""Sampling, verification and n-gram scan in Triton, interpreted, equal their references."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from slipstream.kernels.drafts.ngram_scan import Haystack, Predictions, ngram_scan_reference
from slipstream.kernels.sampling.finish_samples import finish_samples_reference
from slipstream.kernels.sampling.process_logits import apply_top_k_top_p_reference
from slipstream.kernels.sampling.sample import DRAFT, TARGET, gumbel_sample_reference
from slipstream.kernels.sampling.verify import VerifyRows, rejection_sample_reference
from slipstream.kernels.sampling.verify import emit_by_chance as emit_by_chance_reference
from slipstream.kernels.sampling.verify import emit_matching as emit_matching_reference

from ...cases import some

pytestmark = [
    pytest.mark.usefixtures("triton_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy: wrap-around, inf and nan
]


NUM_REQS = 6  # few, since each row of a real vocabulary takes the interpreter long


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use several blocks per row, the last one partly filled."""
    from slipstream.kernels.drafts.triton import ngram_scan
    from slipstream.kernels.sampling.triton import sample, top_k_top_p

    monkeypatch.setattr(sample, "BLOCK", 128)
    monkeypatch.setattr(ngram_scan, "BLOCK", 16)
    monkeypatch.setattr(top_k_top_p, "BLOCK", 128)


@pytest.mark.parametrize("vocab_size", [40, 300])
def test_gumbel_sample(vocab_size: int) -> None:
    from slipstream.kernels.sampling.triton.sample import gumbel_sample

    torch.manual_seed(vocab_size)
    logits = torch.randn(4, vocab_size)
    logits[:, ::3] = -torch.inf
    seeds, positions = torch.randint(-(2**62), 2**62, (4,)), torch.randint(0, 9999, (4,))
    greedy = torch.arange(4) == 0
    salts = torch.arange(4)
    for salt, mask in ((TARGET, None), (DRAFT, greedy), (salts, greedy)):
        expected = gumbel_sample_reference(logits, seeds, positions, salt, mask)
        assert torch.equal(gumbel_sample(logits, seeds, positions, salt, mask), expected)


def test_nan_never_gives_an_id_outside_the_vocabulary() -> None:
    from slipstream.kernels.sampling.triton.sample import gumbel_sample

    logits = torch.full((2, 70), torch.nan)
    logits[1] = -torch.inf
    tokens = gumbel_sample(logits, torch.arange(2), torch.arange(2), TARGET)
    assert ((tokens >= 0) & (tokens < 70)).all()


def ragged_rows(
    kind: str, vocab_size: int, draft_vocab: int, num_reqs: int = NUM_REQS
) -> VerifyRows:
    """Requests with 0 .. 3 drafts, some -1, some greedy, slots out of order."""
    counts = torch.randint(0, 4, (num_reqs,))
    width = 4
    cu = torch.zeros(num_reqs + 1, dtype=torch.int32)
    cu[1:] = (counts + 1).cumsum(0)
    num_rows = int(cu[-1])
    rows = torch.arange(num_reqs).repeat_interleave(counts + 1)
    local = torch.arange(num_rows) - cu[rows]
    slots = torch.randperm(num_reqs)[rows]
    logits = torch.randn(num_rows, vocab_size) * 2
    logits[torch.rand_like(logits) < 0.2] = -torch.inf
    logits[:, 0] = 1.0
    q = logits[:, :draft_vocab] + torch.randn(num_rows, draft_vocab)
    stored = torch.randn(num_reqs, 3, draft_vocab)
    drafts = torch.multinomial(q.softmax(-1), 1)[:, 0]
    is_draft = local < counts[rows]
    stored[slots[is_draft], local[is_draft]] = q[is_draft]
    greedy = (torch.arange(num_reqs) % 5 == 0)[rows]
    drafts = torch.where(greedy, logits.argmax(-1), drafts)
    drafts[~is_draft | (torch.rand(num_rows) < 0.1)] = -1
    return VerifyRows(
        logits=logits,
        draft_ids=drafts,
        draft_logits=stored if kind == "probabilistic" else None,
        slots=slots.int(),
        local_pos=local.int(),
        cu_num_logits=cu,
        seeds=slots * 1000003,
        positions=local + 17,
        greedy=greedy,
        all_greedy=False,
        any_greedy=True,
        width=width,
    )


@pytest.mark.parametrize("kind", ["one_hot", "probabilistic"])
def test_rejection_sample(kind: str) -> None:
    from slipstream.kernels.sampling.triton.verify import rejection_sample

    torch.manual_seed(3)
    rows = ragged_rows(kind, 200, 150)
    emitted, accepted = rejection_sample(rows)
    expected, expected_accepted = rejection_sample_reference(rows)
    assert torch.equal(accepted, expected_accepted)
    assert torch.equal(emitted, expected)
    assert accepted.float().std() > 0.5


@pytest.mark.parametrize("kind", some(("one_hot", "probabilistic"), ("probabilistic",)))
def test_rejection_sample_of_logits_as_the_head_wrote_them(kind: str) -> None:
    """Logits are divided by the temperature on reading; seeded requests keep their drawn tokens."""
    from slipstream.kernels.sampling.triton.verify import rejection_sample

    torch.manual_seed(9)
    rows = ragged_rows(kind, 200, 150)
    heat = torch.where(rows.greedy, 0.0, torch.rand(rows.greedy.shape) + 0.3)
    seeded = torch.arange(NUM_REQS) % 3 // 2 * 5  # by slot
    drawn = torch.where(torch.rand(heat.shape) < 0.5, rows.draft_ids, 7).clamp(min=0)
    rows = replace(rows, logits=rows.logits.half(), temperature=heat, seeded=seeded, drawn=drawn)
    scaled = rows.logits.float() / torch.where(heat > 0, heat, 1.0)[:, None]
    for of in (rows, replace(rows, logits=scaled, temperature=None)):
        got, expected = rejection_sample(of), rejection_sample_reference(rows)
        assert all(torch.equal(*pair) for pair in zip(got, expected, strict=True))
    own = seeded[rows.slots[rows.cu_num_logits[:-1].long()].long()] != 0
    matching, by_chance = emit_matching_reference(rows, drawn), replace(rows, seeded=None)
    assert torch.equal(got[0][own], matching[0][own]) and own.any() and not own.all()
    assert torch.equal(got[0][~own], rejection_sample_reference(by_chance)[0][~own])


def test_an_empty_residual_falls_back_to_the_target() -> None:
    from slipstream.kernels.sampling.triton.verify import rejection_sample

    torch.manual_seed(4)
    rows = ragged_rows("probabilistic", 200, 200)
    assert rows.draft_logits is not None
    # p and q both give token 150 probability 1, and the draft is another: p - q is empty
    for logits in (rows.logits, rows.draft_logits):
        logits.fill_(-torch.inf)
        logits[..., 150] = 1.0
    rows.draft_ids[rows.draft_ids >= 0] = 5
    emitted, accepted = rejection_sample(rows)
    assert (accepted == 0).all()
    assert (emitted[:, 0] == 150).all() and (emitted[:, 1:] == -1).all()
    assert torch.equal(emitted, rejection_sample_reference(rows)[0])


@pytest.mark.parametrize("with_drafts", [False, True])
def test_emit_matching(with_drafts: bool) -> None:
    from slipstream.kernels.sampling.triton.emit_drawn import emit_matching

    torch.manual_seed(5)
    rows = ragged_rows("one_hot", 12, 12, 10)
    if not with_drafts:
        alone = rows.local_pos == 0
        columns = {
            name: value[alone]
            for name, value in vars(rows).items()
            if isinstance(value, Tensor) and value.shape[0] == alone.shape[0]
        }
        starts = torch.arange(int(alone.sum()) + 1, dtype=torch.int32)
        rows = replace(rows, **columns, cu_num_logits=starts)
        rows.draft_ids.fill_(-1)
    drawn = torch.where(rows.draft_ids >= 0, rows.draft_ids, 7)
    drawn[torch.rand(drawn.shape[0]) < 0.2] = 3
    expected = emit_matching_reference(rows, drawn)
    for got, wanted in zip(emit_matching(rows, drawn), expected, strict=True):
        assert torch.equal(got, wanted)
    assert (expected[1].max() > 0) == with_drafts


def test_emit_by_chance() -> None:
    from slipstream.kernels.sampling.triton.emit_drawn import emit_by_chance

    torch.manual_seed(8)
    rows = ragged_rows("one_hot", 12, 12, 10)
    drawn = torch.randint(0, 12, rows.draft_ids.shape)
    rates = torch.tensor([0.9, 0.8, 0.7])
    expected = emit_by_chance_reference(rows, drawn, rates)
    for got, wanted in zip(emit_by_chance(rows, drawn, rates), expected, strict=True):
        assert torch.equal(got, wanted)
    assert expected[1].unique().numel() > 2


@pytest.mark.parametrize("restricted", [False, True])
def test_finish_samples(restricted: bool) -> None:
    from slipstream.kernels.sampling.triton.finish_samples import finish_samples

    torch.manual_seed(6)
    rows = ragged_rows("one_hot", 12, 12, 10)
    num_reqs, num_rows = rows.cu_num_logits.shape[0] - 1, rows.logits.shape[0]
    accepted = torch.minimum(torch.randint(0, 4, (num_reqs,)), rows.cu_num_logits.diff() - 1)
    emitted = torch.randint(0, 12, (num_reqs, 4))
    faults = torch.tensor([torch.nan, torch.inf, -torch.inf])
    raw, processed = torch.randn(num_rows), torch.randn(num_rows)
    raw[::5] = faults[torch.arange(raw[::5].shape[0]) % 3]
    processed[::4] = -torch.inf
    of = SimpleNamespace(
        cu_num_logits=rows.cu_num_logits,
        idx_mapping=torch.randperm(num_reqs).int(),
        seq_lens=torch.randint(3, 6, (num_reqs,)).int(),
    )
    prefill_len = torch.randint(2, 6, (num_reqs,)).int()
    args = (accepted.long(), raw, processed if restricted else None, of, prefill_len)
    kept = emitted.clone()
    expected = finish_samples_reference(kept, *args)
    for got, wanted in zip(finish_samples(emitted, *args), expected, strict=True):
        assert torch.equal(got, wanted)
    assert torch.equal(emitted, kept) and (kept == -1).any()
    assert expected[2].any() and not expected[2].all()


def test_top_k_top_p() -> None:
    from slipstream.kernels.sampling.triton import top_k_top_p

    torch.manual_seed(7)
    logits = torch.randn(10, 150) * 2
    logits[3] = logits[3].round()  # ties
    logits[4, 5:] = -torch.inf
    logits[5] = -torch.inf
    top_k = torch.tensor([0, 5, 0, 7, 9, 3, 1, 150, 400, 0])
    top_p = torch.tensor([1.0, 1.0, 0.5, 0.7, 0.9, 0.5, 0.3, 0.8, 0.95, 1e-9])
    expected, got = logits.clone(), logits.clone()
    apply_top_k_top_p_reference(expected, top_k, top_p, None, True)
    top_k_top_p.apply_top_k_top_p(got, top_k, top_p, None, True)
    assert torch.equal(got, expected)
    assert (got[5] == -torch.inf).all()
    assert (expected > -torch.inf).sum(1).unique().numel() > 4
    expected, got = logits[:2].clone(), logits[:2].clone()
    apply_top_k_top_p_reference(expected, top_k[:2], top_p[:2], None, False)
    top_k_top_p.apply_top_k_top_p(got, top_k[:2], top_p[:2], None, False)
    assert torch.equal(got, expected)


def padded(rows: list[Tensor], width: int) -> tuple[Tensor, Tensor]:
    table = torch.randint(0, 3, (len(rows), width), dtype=torch.int32)
    for row, tokens in enumerate(rows):
        table[row, : tokens.shape[0]] = tokens
    return table, torch.tensor([row.shape[0] for row in rows])


@pytest.mark.parametrize("with_prediction", [False, True])
@pytest.mark.parametrize(("min_n", "max_n", "k"), [(2, 4, 5), (1, 1, 3)])
def test_ngram_scan(min_n: int, max_n: int, k: int, with_prediction: bool) -> None:
    from slipstream.kernels.drafts.triton.ngram_scan import ngram_scan

    torch.manual_seed(min_n)
    table, lengths = padded(
        [torch.randint(0, 4, (int(n),)) for n in torch.randint(1, 60, (6,))], 64
    )
    predicted, sizes = padded(
        [torch.randint(0, 4, (int(n),)) for n in torch.randint(0, 40, (6,))], 48
    )
    prompts = torch.minimum(torch.randint(1, 9, (6,)), lengths).int()
    haystack = Haystack(table, prompts)
    if with_prediction:
        texts = Predictions(predicted.flatten(), torch.arange(6) * 48, sizes, 48)
        haystack = Haystack(table, prompts, texts)
    slots = torch.randperm(6)
    known = lengths[slots].int()
    known[::5] = 0
    drafts = ngram_scan(haystack, slots, known, min_n, max_n, k)
    expected = ngram_scan_reference(haystack, slots, known, min_n, max_n, k)
    assert torch.equal(drafts, expected)
    assert (expected >= 0).any() and (expected < 0).any()


@pytest.mark.parametrize("with_prediction", [False, True])
def test_ngram_scan_reads_nothing_behind_the_texts(
    with_prediction: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of positions may be longer than the texts, behind which a GPU may have no memory.

    The interpreter refuses pointers into anything but the arguments."""
    from slipstream.kernels.drafts.triton import ngram_scan

    monkeypatch.setattr(ngram_scan, "BLOCK", 64)
    table, prompts = torch.tensor([[1, 2, 3, 1, 2]]).int(), torch.tensor([3]).int()
    texts = Predictions(torch.tensor([1, 2, 9]).int(), torch.tensor([0]), torch.tensor([3]), 3)
    haystack = Haystack(table, prompts, texts if with_prediction else None)
    slots, known = torch.tensor([0]), torch.tensor([5]).int()
    drafts = ngram_scan.ngram_scan(haystack, slots, known, 1, 2, 1)
    assert drafts.tolist() == [[9 if with_prediction else 3]]
