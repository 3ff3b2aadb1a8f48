"""Sampling, verification and n-gram scan in Triton, interpreted, against their references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.kernels.ngram_scan import Haystack, ngram_scan_reference
from slipstream.kernels.sample import DRAFT, TARGET, gumbel_sample_reference
from slipstream.kernels.verify import VerifyRows, rejection_sample_reference

pytestmark = [
    pytest.mark.usefixtures("triton_interpreter"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy: wrap-around, inf and nan
]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks per row, the last one ragged."""
    from slipstream.kernels.triton import ngram_scan, sample

    monkeypatch.setattr(sample, "BLOCK", 128)
    monkeypatch.setattr(ngram_scan, "BLOCK", 16)


@pytest.mark.parametrize("vocab_size", [40, 300])
def test_gumbel_sample(vocab_size: int) -> None:
    from slipstream.kernels.triton.sample import gumbel_sample

    torch.manual_seed(vocab_size)
    logits = torch.randn(8, vocab_size)
    logits[:, ::3] = -torch.inf
    seeds, positions = torch.randint(-(2**62), 2**62, (8,)), torch.randint(0, 9999, (8,))
    greedy = torch.arange(8) % 4 == 0
    salts = torch.arange(8) % 4
    for salt, mask in ((TARGET, None), (DRAFT, greedy), (salts, greedy)):
        expected = gumbel_sample_reference(logits, seeds, positions, salt, mask)
        assert torch.equal(gumbel_sample(logits, seeds, positions, salt, mask), expected)


def test_nan_never_gives_an_id_outside_the_vocabulary() -> None:
    from slipstream.kernels.triton.sample import gumbel_sample

    logits = torch.full((2, 70), torch.nan)
    logits[1] = -torch.inf
    tokens = gumbel_sample(logits, torch.arange(2), torch.arange(2), TARGET)
    assert ((tokens >= 0) & (tokens < 70)).all()


def ragged_rows(kind: str, vocab_size: int, draft_vocab: int) -> VerifyRows:
    """Requests with 0 .. 3 drafts, some -1, some greedy, slots out of order."""
    counts = torch.randint(0, 4, (16,))
    num_reqs, width = counts.shape[0], 4
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
    from slipstream.kernels.triton.verify import rejection_sample

    torch.manual_seed(3)
    rows = ragged_rows(kind, 200, 150)
    emitted, accepted = rejection_sample(rows)
    expected, expected_accepted = rejection_sample_reference(rows)
    assert torch.equal(accepted, expected_accepted)
    assert torch.equal(emitted, expected)
    assert accepted.float().std() > 0.5


def test_an_empty_residual_falls_back_to_the_target() -> None:
    from slipstream.kernels.triton.verify import rejection_sample

    torch.manual_seed(4)
    rows = ragged_rows("probabilistic", 200, 200)
    assert rows.draft_logits is not None
    # p and q are certain of token 150, and the draft is another: nothing is left of p - q
    for logits in (rows.logits, rows.draft_logits):
        logits.fill_(-torch.inf)
        logits[..., 150] = 1.0
    rows.draft_ids[rows.draft_ids >= 0] = 5
    emitted, accepted = rejection_sample(rows)
    assert (accepted == 0).all()
    assert (emitted[:, 0] == 150).all() and (emitted[:, 1:] == -1).all()
    assert torch.equal(emitted, rejection_sample_reference(rows)[0])


def padded(rows: list[Tensor], width: int) -> tuple[Tensor, Tensor]:
    table = torch.randint(0, 3, (len(rows), width), dtype=torch.int32)
    for row, tokens in enumerate(rows):
        table[row, : tokens.shape[0]] = tokens
    return table, torch.tensor([row.shape[0] for row in rows])


@pytest.mark.parametrize("with_prediction", [False, True])
@pytest.mark.parametrize(("min_n", "max_n", "k"), [(2, 4, 5), (1, 1, 3)])
def test_ngram_scan(min_n: int, max_n: int, k: int, with_prediction: bool) -> None:
    from slipstream.kernels.triton.ngram_scan import ngram_scan

    torch.manual_seed(min_n)
    table, lengths = padded(
        [torch.randint(0, 4, (int(n),)) for n in torch.randint(1, 60, (24,))], 64
    )
    predicted, sizes = padded(
        [torch.randint(0, 4, (int(n),)) for n in torch.randint(0, 40, (24,))], 48
    )
    prompts = torch.minimum(torch.randint(1, 9, (24,)), lengths).int()
    haystack = Haystack(table, prompts)
    if with_prediction:
        haystack = Haystack(table, prompts, predicted, sizes)
    slots = torch.randperm(24)
    known = lengths[slots].int()
    known[::9] = 0
    drafts = ngram_scan(haystack, slots, known, min_n, max_n, k)
    expected = ngram_scan_reference(haystack, slots, known, min_n, max_n, k)
    assert torch.equal(drafts, expected)
    assert (expected >= 0).any() and (expected < 0).any()
