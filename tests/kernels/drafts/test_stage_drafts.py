"""Staging a target's step and storing drafts equal plain lists, with and without padding."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from slipstream.kernels import operation
from slipstream.kernels.drafts import stage_drafts

SLOTS, MAX_REQS, TOKENS, K, VOCAB, MAX_POSITION, POISON = 7, 6, 40, 3, 50, 30, 77


@pytest.fixture(params=["torch", "triton"], autouse=True)
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test with the references, and with interpreted Triton kernels."""
    triton = request.param == "triton"
    if triton:
        request.getfixturevalue("triton_interpreter")
    monkeypatch.setattr(operation, "use_triton", lambda tensor: triton)


def a_step(seed: int, num_reqs: int) -> tuple[SimpleNamespace, SimpleNamespace, list[int]]:
    """Make a target's step: (its tensors, the requests, query lengths)."""
    torch.manual_seed(seed)
    lens = torch.randint(1, 6, (num_reqs,)).tolist()
    starts = torch.zeros(MAX_REQS + 1, dtype=torch.int32)
    starts[1 : num_reqs + 1] = torch.tensor(lens).cumsum(0)
    starts[num_reqs + 1 :] = sum(lens)
    idx_mapping = torch.full((MAX_REQS,), -1, dtype=torch.int32)
    idx_mapping[:num_reqs] = torch.randperm(SLOTS)[:num_reqs]
    first = torch.randint(0, MAX_POSITION, (num_reqs,)).tolist()
    positions = torch.zeros(TOKENS, dtype=torch.int64)
    at = [p for begin, n in zip(first, lens, strict=True) for p in range(begin, begin + n)]
    positions[: len(at)] = torch.tensor(at)
    seq_lens = torch.zeros(MAX_REQS, dtype=torch.int32)
    seq_lens[:num_reqs] = torch.tensor([b + n for b, n in zip(first, lens, strict=True)])
    rejected = [int(torch.randint(0, n, ())) for n in lens]
    sampled = [int(torch.randint(0, 3, ())) for _ in lens]
    counts = torch.full((2, MAX_REQS), POISON, dtype=torch.int32)  # padded rows may have any value
    counts[0, :num_reqs], counts[1, :num_reqs] = torch.tensor(sampled), torch.tensor(rejected)
    of = SimpleNamespace(
        input_ids=torch.randint(0, VOCAB, (TOKENS,), dtype=torch.int32),
        positions=positions, query_start_loc=starts, idx_mapping=idx_mapping, seq_lens=seq_lens,
        num_sampled=counts[0], num_rejected=counts[1],
    )  # fmt: skip
    requests = SimpleNamespace(
        last_sampled_tokens=torch.randint(0, VOCAB, (SLOTS,)),
        next_prefill_tokens=torch.randint(0, VOCAB, (SLOTS,)),
        temperature=torch.rand(SLOTS),
        seed=torch.randint(0, 1 << 40, (SLOTS,)),
        max_drafts=torch.randint(0, K + 2, (SLOTS,), dtype=torch.int32),
    )
    return of, requests, lens


def drafter() -> SimpleNamespace:
    ints, longs = {"dtype": torch.int32}, {"dtype": torch.int64}
    names = {name: longs for name in ("last_token_indices", "decode_positions", "noise_positions")}
    names |= {name: ints for name in ("idx_mapping", "seq_lens", "allowed")}
    names |= {"seed": longs, "temperature": {"dtype": torch.float32}}
    return SimpleNamespace(
        input_ids=torch.full((TOKENS,), POISON, **ints),
        positions=torch.full((TOKENS,), POISON, **longs),
        query_start_loc=torch.full((MAX_REQS + 1,), POISON, **ints),
        draft_tokens=torch.full((MAX_REQS, K), POISON),
        step=torch.full((MAX_REQS,), POISON),
        **{name: torch.full((MAX_REQS,), POISON, **kind) for name, kind in names.items()},
    )


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("num_reqs", [1, 4, MAX_REQS])
def test_a_step_in_the_buffers(num_reqs: int, padded: bool) -> None:
    of, requests, lens = a_step(num_reqs, num_reqs)
    out, tokens = drafter(), sum(lens) + 2
    rows = MAX_REQS if padded else num_reqs
    stage_drafts.stage_draft_rows(of, requests, out, rows, tokens, MAX_POSITION)
    ids, expected = [], []
    for row, length in enumerate(lens):
        start, slot = int(of.query_start_loc[row]), int(of.idx_mapping[row])
        valid = length - int(of.num_rejected[row])
        source = requests.last_sampled_tokens if of.num_sampled[row] else (
            requests.next_prefill_tokens
        )  # fmt: skip
        ids += of.input_ids[start + 1 : start + valid].tolist() + [int(source[slot])]
        ids += [0] * (length - valid)
        last = start + valid - 1
        position = int(of.positions[last])
        cap = min(int(requests.max_drafts[slot]), K, MAX_POSITION - position)
        expected.append(
            (
                slot, last, position, int(of.seq_lens[row]) - int(of.num_rejected[row]),
                position + 1, float(requests.temperature[slot]),
                max(cap, 0) if of.num_sampled[row] else 0,
            )
        )  # fmt: skip
        assert int(out.seed[row]) == int(requests.seed[slot])
    expected += [(-1, 0, 0, 0, 1, 0.0, 0)] * (MAX_REQS - num_reqs)
    names = ("idx_mapping", "last_token_indices", "decode_positions", "seq_lens")
    names += ("noise_positions", "temperature", "allowed")
    found = [getattr(out, name).tolist() for name in names]
    assert list(zip(*found, strict=True)) == expected
    assert out.input_ids.tolist() == [*ids, 0, 0] + [POISON] * (TOKENS - tokens)
    clamped = of.positions[: sum(lens)].clamp(max=MAX_POSITION - 1).tolist()
    assert out.positions.tolist() == [*clamped, 0, 0] + [POISON] * (TOKENS - tokens)
    starts = [min(i, num_reqs) for i in range(MAX_REQS + 1)]
    assert out.query_start_loc.tolist() == starts and out.step.tolist() == [0] * MAX_REQS


def test_the_worked_example_of_one_accepted_draft_beside_a_chunk_of_a_prompt() -> None:
    # Row 0 verifies three drafts from position 7 and accepts one; row 1 is a chunk at 0..2.
    of, requests, _ = a_step(0, 2)
    of.input_ids = torch.tensor([7, 8, 9, 10, 40, 41, 42, 99, 99], dtype=torch.int32)
    of.positions = torch.tensor([7, 8, 9, 10, 0, 1, 2, 0, 0])
    of.query_start_loc = torch.tensor([0, 4, 7, 7], dtype=torch.int32)
    of.idx_mapping = torch.tensor([2, 0, -1], dtype=torch.int32)
    of.seq_lens = torch.tensor([11, 3, 0], dtype=torch.int32)
    of.num_sampled, of.num_rejected = torch.tensor([[2, 0, POISON], [2, 0, POISON]]).int()
    requests.last_sampled_tokens[2], requests.next_prefill_tokens[0] = 50, 43
    out = drafter()
    stage_drafts.stage_draft_rows(of, requests, out, 3, 9, MAX_POSITION)
    assert out.input_ids[:9].tolist() == [8, 50, 0, 0, 41, 42, 43, 0, 0]
    assert out.last_token_indices[:3].tolist() == [1, 6, 0]
    assert out.decode_positions[:3].tolist() == [8, 2, 0] and out.seq_lens[:3].tolist() == [9, 3, 0]


@pytest.mark.parametrize("made", [1, 2, K])
def test_drafts_go_to_their_slots(made: int) -> None:
    torch.manual_seed(made)
    of = drafter()
    of.draft_tokens = torch.randint(0, VOCAB, (MAX_REQS, K))
    of.idx_mapping = torch.tensor([5, 0, 3, 6, -1, -1], dtype=torch.int32)
    of.allowed = torch.tensor([3, 0, 2, 3, 0, 0], dtype=torch.int32)
    most = torch.tensor([3, 3, 3, 1, 9, 9], dtype=torch.int32)
    table, before = torch.full((SLOTS, K), POISON), of.draft_tokens.clone()
    stage_drafts.store_draft_rows(of, most, table, MAX_REQS, made)
    for row, slot in enumerate((5, 0, 3, 6)):
        own = min(made, int(of.allowed[row]))
        drafts = before[row, :own].tolist()
        kept = drafts[: int(most[row])]
        assert table[slot].tolist() == kept + [-1] * (K - len(kept))
        rest = before[row, made:].tolist()
        assert of.draft_tokens[row].tolist() == drafts + [-1] * (made - own) + rest
    assert (table[[1, 2, 4]] == POISON).all()
