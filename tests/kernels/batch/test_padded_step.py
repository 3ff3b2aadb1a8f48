"""The kernels that begin and end a step inside a graph equal the plain ones for any rows."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels import operation
from slipstream.kernels.batch import gather_batch, padded_step
from slipstream.kernels.batch.step_sizes import StepSizes
from slipstream.kernels.linear import head_sample
from slipstream.kernels.sampling.finish_samples import finish_samples, finish_samples_reference

from ...cases import some
from ..step_buffers import POISON, poisoned_buffers, sampled_tokens

SLOTS, MAX_LEN, DRAFTS, MAX_REQS, VOCAB = 7, 40, 3, 6, 50
MAX_TOKENS = MAX_REQS * (DRAFTS + 1)


@pytest.fixture(params=["torch", "triton"])
def triton(request: pytest.FixtureRequest) -> bool:
    """Run the test with the references, and with interpreted Triton kernels."""
    if request.param == "triton":
        request.getfixturevalue("triton_interpreter")
        return True
    return False


@pytest.fixture(autouse=True)
def chosen(triton: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (padded_step, head_sample, operation):
        monkeypatch.setattr(module, "use_triton", lambda tensor: triton)


def step(seed: int, num_reqs: int, length: int) -> tuple[SimpleNamespace, SimpleNamespace]:
    """A table, and a batch of decodes with `length` - 1 drafts each; outputs are poisoned."""
    torch.manual_seed(seed)
    prefill = torch.randint(1, 20, (SLOTS,), dtype=torch.int32)
    total = prefill + torch.randint(1, MAX_LEN - 20, (SLOTS,), dtype=torch.int32)
    requests = SimpleNamespace(
        all_token_ids=torch.randint(0, VOCAB, (SLOTS, MAX_LEN), dtype=torch.int32),
        prefill_len=prefill,
        total_len=total,
        num_computed_tokens=total - 1,
        last_sampled_tokens=torch.randint(0, VOCAB, (SLOTS,)),
        next_prefill_tokens=torch.randint(0, VOCAB, (SLOTS,)),
        draft_tokens=torch.randint(-1, VOCAB, (SLOTS, DRAFTS)),
    )
    batch = SimpleNamespace(idx_mapping=torch.full((MAX_REQS,), -1, dtype=torch.int32))
    batch.idx_mapping[:num_reqs] = torch.randperm(SLOTS)[:num_reqs]
    starts = torch.arange(MAX_REQS + 1, dtype=torch.int32).clamp(max=num_reqs) * length
    batch.query_start_loc, batch.cu_num_logits = starts, starts.clone()
    vars(batch).update(poisoned_buffers(MAX_REQS, MAX_TOKENS))
    return requests, batch


def copy_of(space: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(**{name: value.clone() for name, value in vars(space).items()})


def equal(left: SimpleNamespace, right: SimpleNamespace) -> None:
    for name, value in vars(left).items():
        assert torch.equal(value, getattr(right, name)), name


@pytest.mark.parametrize("length", [1, 3, 4])
@pytest.mark.parametrize("num_reqs", [1, 3, MAX_REQS])
def test_inputs_equal_those_of_real_rows(num_reqs: int, length: int) -> None:
    requests, batch = step(num_reqs * length, num_reqs, length)
    table, expected = copy_of(requests), copy_of(batch)
    tokens, padded = num_reqs * length, MAX_REQS * length
    sizes = StepSizes(num_reqs, tokens, tokens, MAX_REQS, padded)
    gather_batch.prepare_inputs_reference(table, expected, sizes)
    for name in ("logits_indices", "expanded_idx_mapping", "expanded_local_pos"):
        getattr(expected, name)[tokens:padded] = 0  # rows that a plain step does not have
    expected.logits_positions[tokens:padded] = 0
    expected.draft_ids[tokens:padded] = -1
    padded_step.prepare_padded_inputs(requests, batch, MAX_REQS, padded, padded)
    equal(batch, expected)
    equal(requests, table)


def test_without_a_drafter_and_with_a_final_prompt_chunk() -> None:
    requests, batch = step(5, 4, 1)
    requests.draft_tokens = requests.draft_tokens[:, :0].contiguous()
    slot = int(batch.idx_mapping[2])
    requests.prefill_len[slot] = requests.num_computed_tokens[slot] + 1
    table, expected = copy_of(requests), copy_of(batch)
    sizes = StepSizes(4, 4, 4, MAX_REQS, MAX_REQS)
    gather_batch.prepare_inputs_reference(table, expected, sizes)
    padded_step.prepare_padded_inputs(requests, batch, MAX_REQS, MAX_REQS, MAX_REQS)
    assert batch.input_ids[:4].equal(expected.input_ids[:4])
    last = int(requests.num_computed_tokens[slot])
    assert batch.input_ids[2] == requests.all_token_ids[slot, last]


def test_a_capture_has_tokens_of_nobody() -> None:
    requests, batch = step(6, 3, 2)
    before = copy_of(requests)
    batch.idx_mapping.fill_(-1)
    padded_step.prepare_padded_inputs(requests, batch, 3, 6, 6)
    assert batch.seq_lens.tolist() == [2, 2, 2, 0, 0, 0]
    assert batch.input_ids[:6].tolist() == [0] * 6
    assert batch.positions[:6].tolist() == [0, 1] * 3
    assert batch.draft_ids[:6].tolist() == [-1] * 6
    equal(requests, before)


@pytest.mark.parametrize("num_reqs", [1, 4, MAX_REQS])
def test_blocks_and_slots(num_reqs: int) -> None:
    _, batch = step(num_reqs, num_reqs, 3)
    tables = [torch.randint(0, 9, (SLOTS, width), dtype=torch.int32) for width in (4, 11)]
    got = [torch.full((MAX_REQS, table.shape[1]), POISON, dtype=torch.int32) for table in tables]
    expected = [table.clone() for table in got]
    gather_batch.gather_block_tables_reference(
        tables, batch.idx_mapping, expected, num_reqs, MAX_REQS
    )
    padded_step.gather_padded_tables(tables, batch.idx_mapping, got, MAX_REQS)
    for left, right in zip(got, expected, strict=True):
        assert torch.equal(left, right)
    positions, padded = torch.randint(0, 70, (MAX_TOKENS,)), MAX_REQS * 3
    outs = [torch.full((2, MAX_TOKENS), POISON) for _ in range(2)]
    args = (got, [4, 8], batch.query_start_loc, positions)
    gather_batch.compute_slot_mappings_reference(*args, outs[0], num_reqs, num_reqs * 3, padded)
    padded_step.map_padded_slots(*args, outs[1], MAX_REQS, padded)
    assert torch.equal(outs[0], outs[1])


@pytest.mark.parametrize("num_reqs", [1, 3, MAX_REQS])
def test_commit_is_post_update_and_what_the_host_reads(num_reqs: int) -> None:
    requests, batch = step(40 + num_reqs, num_reqs, DRAFTS + 1)
    slot = int(batch.idx_mapping[0])
    requests.total_len[slot] = MAX_LEN - 1  # the table ends within the emitted tokens
    batch.num_draft_tokens = torch.randint(0, DRAFTS + 1, (MAX_REQS,), dtype=torch.int32)
    live = torch.arange(MAX_REQS) < num_reqs
    accepted = torch.randint(0, DRAFTS + 1, (MAX_REQS,))
    accepted[0] = DRAFTS
    num_sampled = torch.where(live, accepted + 1, 0).int()
    if num_reqs > 1:
        num_sampled[1] = 0
    num_rejected = torch.where(live, DRAFTS + 1 - num_sampled, 0).int()
    tokens = torch.randint(0, VOCAB, (MAX_REQS, DRAFTS + 1))
    tokens.masked_fill_(torch.arange(DRAFTS + 1) >= num_sampled[:, None], -1)
    is_bad = torch.rand(MAX_REQS) < 0.5
    table = copy_of(requests)
    real = sampled_tokens(*(t[:num_reqs] for t in (tokens, num_sampled, num_rejected)))
    gather_batch.post_update_reference(table, batch, real, None)
    packed, counts = torch.full((MAX_REQS, DRAFTS + 4), POISON), torch.full((2, 9), POISON).int()
    sampled = sampled_tokens(tokens, num_sampled, num_rejected, is_bad)
    padded_step.commit_step(requests, batch, sampled, packed, counts)
    equal(requests, table)
    columns = [num_sampled, batch.num_draft_tokens, is_bad]
    assert packed.equal(torch.cat([tokens, *(c.long()[:, None] for c in columns)], 1))
    assert counts[:, :MAX_REQS].equal(torch.stack([num_sampled, num_rejected]))
    assert (counts[:, MAX_REQS:] == POISON).all()


def test_padded_rows_emit_nothing_and_are_never_bad(triton: bool) -> None:
    finish: Callable[..., Any] = finish_samples
    if triton:
        from slipstream.kernels.sampling.triton.finish_samples import finish_samples as finish
    rows = SimpleNamespace(
        cu_num_logits=torch.tensor([0, 2, 4, 4, 4], dtype=torch.int32),
        idx_mapping=torch.tensor([2, 1, -1, -1], dtype=torch.int32),
        seq_lens=torch.tensor([9, 9, 0, 0], dtype=torch.int32),
    )
    prefill_len = torch.zeros(SLOTS, dtype=torch.int32)
    args = (torch.tensor([1, 0, 0, 0]), torch.full((8,), torch.nan), None, rows, prefill_len)
    for run in (finish, finish_samples_reference):
        emitted = torch.arange(8).view(4, 2)
        num_sampled, num_rejected, is_bad = run(emitted, *args)
        assert num_sampled.tolist() == [2, 1, 0, 0] and num_rejected.tolist() == [0, 1, 0, 0]
        assert is_bad.tolist() == [True, True, False, False]
        assert emitted.tolist() == [[0, 1], [2, 3], [-1, -1], [-1, -1]]


@pytest.mark.parametrize(
    ("vocab", "tiles", "dtype"),
    some(
        [
            (vocab, tiles, dtype)
            for vocab in (50, 9000)
            for tiles in (1, 2)
            for dtype in (torch.float32, torch.bfloat16)
        ],
        kept=[(50, 1, torch.bfloat16), (50, 2, torch.float32), (9000, 2, torch.bfloat16)],
    ),
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy, about inf and nan
def test_pick_rows(
    vocab: int, tiles: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where each of several ranks has a part of the vocabulary."""
    from slipstream.kernels.linear.triton import head_sample as picks

    monkeypatch.setattr(picks, "BEST_OF_BLOCK", (8, None, tiles))
    torch.manual_seed(vocab)
    logits = (torch.randn(6, vocab + 8) * 3).to(dtype)[:, :vocab]
    logits[2, 7] = logits[2, vocab - 3] = 30.0  # a tie: the lower id
    logits[4, 11], logits[5, 20:] = torch.nan, -torch.inf
    temperature = torch.tensor([0.0, 0.7, 0.0, 1.3, 0.0, 0.9])
    draws = head_sample.Draws(
        torch.randint(0, 99, (6,)), torch.randint(0, 99, (6,)), temperature == 0, temperature
    )
    for drawn in (None, draws):
        tokens, largest = head_sample.pick_rows(logits, drawn)
        expected = head_sample.pick_rows_reference(logits, drawn)
        healthy = [0, 1, 2, 3, 5]
        assert tokens[healthy].equal(expected[0][healthy])
        assert largest.dtype == torch.float32 and largest[4].isnan()
        assert largest[healthy].equal(expected[1].float()[healthy])
        bounds = [(0, 5), (5, vocab - 9), (vocab - 9, vocab)]
        parts = [
            head_sample.best_of_part(logits[:, start:stop], drawn, start) for start, stop in bounds
        ]
        found = head_sample.best_of_parts(torch.stack(parts))
        assert found[0][healthy].equal(tokens[healthy]) and found[1][4].isnan()
        assert found[1][healthy].equal(largest[healthy])
    assert tokens[2] == 7


@pytest.mark.usefixtures("triton_interpreter")
def test_rows_draw_as_their_requests_say(monkeypatch: pytest.MonkeyPatch) -> None:
    temperature, seeds = torch.tensor([0.0, 0.7, 1.5]), torch.tensor([5, -(2**62), 9])
    slots, positions = torch.randint(0, 3, (200,)).int(), torch.arange(200)
    for interpreted in ("0", "1"):
        monkeypatch.setenv("SLIPSTREAM_TRITON", interpreted)
        draws = head_sample.gather_draws(slots, temperature, seeds, positions, 3)
        assert torch.equal(draws.temperature, temperature[slots])
        assert torch.equal(draws.seeds, seeds[slots])
        assert torch.equal(draws.greedy, slots == 0) and draws.greedy.dtype == torch.bool
        assert draws.positions is positions and draws.salt == 3


def test_pick_rows_draws_by_seed_and_position(triton: bool) -> None:
    rows = 8 if triton else 64  # fewer programs, since the interpreter is slow
    logits = torch.zeros(rows, VOCAB)
    temperature, positions = torch.ones(rows), torch.arange(rows)

    def pick(seed: int) -> Tensor:
        seeds = torch.full((rows,), seed)
        draws = head_sample.Draws(seeds, positions, temperature == 0, temperature)
        return head_sample.pick_rows(logits, draws)[0]

    first = pick(1)
    assert first.equal(pick(1)) and not first.equal(pick(2))
    assert first.unique().numel() > rows // 3
