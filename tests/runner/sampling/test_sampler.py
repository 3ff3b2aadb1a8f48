"""The sampler step by step: equal to no speculation, reproducible, and reporting faults."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sampler_harness import (
    CPU,
    Table,
    ToyModel,
    expected_distribution,
    generate,
    rows_of,
    sampler,
)

from slipstream.runner.batch.sampling_state import Feature, SamplingState
from slipstream.runner.messages import SamplingParams
from slipstream.runner.sampling.logits_processing import process_logits
from slipstream.runner.sampling.logprobs import token_logprobs

V = 32
MODEL = ToyModel(V)
PROMPTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9, 10], [3, 1], [11, 12], [2, 2, 2]]


def no_drafts(slot: int, tokens: list[int]) -> list[int]:
    return []


def rough_drafts(slot: int, tokens: list[int]) -> list[int]:
    """Usually the model's argmax, sometimes a wrong token or none; a function of the text only."""
    known, drafts = list(tokens), []
    for j in range((len(tokens) + slot) % 4):
        best = int(MODEL.logits(known).argmax())
        chance = (7 * known[-1] + 3 * known[-2] + slot + j) % 5
        drafts.append(-1 if chance == 4 else (best + (chance == 3)) % V)
        known.append(max(drafts[-1], 0))
    return drafts


GREEDY_OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "presence": {"presence_penalty": 1.5},
    "frequency": {"frequency_penalty": 0.7},
    "repetition": {"repetition_penalty": 1.8},
    "bias": {"logit_bias": {3: 4.0, 5: -100.0}},
    "allowed": {"allowed_token_ids": list(range(0, 32, 3))},
    "bad_words": {"bad_words_token_ids": [[3], [7, 9], [9, 7, 1], [25, 1]]},
    "min_tokens": {"min_tokens": 20, "stop_token_ids": [1, 9, 30]},
}


@pytest.mark.parametrize("option", GREEDY_OPTIONS)
def test_trap_13_greedy_text_equals_the_text_without_speculation(option: str) -> None:
    params = SamplingParams(
        seed=1,
        max_tokens=99,
        temperature=0.0,
        **GREEDY_OPTIONS[option],  # type: ignore[arg-type]
    )
    requests = [(params, prompt) for prompt in PROMPTS]
    plain = generate(requests, no_drafts, 30, MODEL, 0)
    assert generate(requests, rough_drafts, 30, MODEL, 3) == plain
    for text, prompt in zip(plain, PROMPTS, strict=True):  # and both equal the naive oracle
        known = list(prompt)
        for emitted in text:
            law = expected_distribution(
                MODEL.logits(known).tolist(), params, prompt, known[len(prompt) :]
            )
            assert law[emitted] == 1.0
            known.append(emitted)


def mixed_requests() -> list[tuple[SamplingParams, list[int]]]:
    options: list[dict[str, object]] = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"top_p": 0.8, "frequency_penalty": 0.4},
        {"top_k": 6, "logit_bias": {4: 1.0}},
        {"min_p": 0.1, "bad_words_token_ids": [[3], [5, 6]]},
        {"temperature": 0.0, "presence_penalty": 0.9, "logprobs": 2},
    ]
    return [
        (SamplingParams(seed=100 + i, max_tokens=99, **of), prompt)  # type: ignore[arg-type]
        for i, (of, prompt) in enumerate(zip(options, PROMPTS, strict=True))
    ]


def shuffled(seed: int) -> Callable[[int], list[int]]:
    """In each step, a random subset of the requests in random order."""
    generator = torch.Generator().manual_seed(seed)

    def order(step: int) -> list[int]:
        count = int(torch.randint(1, len(PROMPTS) + 1, (1,), generator=generator))
        return torch.randperm(len(PROMPTS), generator=generator)[:count].tolist()

    return order


def test_a_seed_gives_the_same_text_in_any_batch_and_padding() -> None:
    requests = mixed_requests()
    first = generate(requests, rough_drafts, 25, MODEL, 3)
    for seed in range(3):
        assert generate(requests, rough_drafts, 25, MODEL, 3, shuffled(seed)) == first
    # a wider output, and chunks of a single request
    assert generate(requests, rough_drafts, 25, MODEL, 7, max_chunk_bytes=1) == first
    alone = [
        generate([request], lambda _, t, slot=slot: rough_drafts(slot, t), 25, MODEL, 3)[0]
        for slot, request in enumerate(requests)
    ]
    assert alone == first
    other = [(SamplingParams(seed=999, max_tokens=9), prompt) for _, prompt in requests]
    assert generate(other, rough_drafts, 25, MODEL, 3)[1] != first[1]


def test_coupled_text_equals_the_text_without_speculation() -> None:
    requests = mixed_requests()
    plain = generate(requests, no_drafts, 25, MODEL, 0)
    coupled = generate(
        requests, rough_drafts, 25, MODEL, 3, shuffled(1), rejection_sampling="coupled"
    )
    assert coupled == plain


def test_a_request_without_drafts_draws_as_if_speculation_were_off() -> None:
    requests = mixed_requests()
    plain = generate(requests, no_drafts, 25, MODEL, 0)
    beside = generate(
        requests, lambda slot, t: [] if slot < 3 else rough_drafts(slot, t), 25, MODEL, 3
    )
    assert beside[:3] == plain[:3]


def test_trap_12_a_banned_id_never_comes_and_min_p_holds_for_every_token() -> None:
    banned = SamplingParams(seed=5, max_tokens=99, logit_bias={7: -100.0, 3: -100.0})
    bounded = SamplingParams(seed=6, max_tokens=99, min_p=0.2)

    def drafts(slot: int, tokens: list[int]) -> list[int]:
        known, out = list(tokens), []
        for _ in range(3):  # likely tokens, and among them the banned one
            top = MODEL.logits(known).topk(6).indices.tolist()
            out.append(7 if tokens[-1] % 3 == 0 else top[(tokens[-1] + slot) % 6])
            known.append(out[-1])
        return out

    for params in (banned, bounded):
        texts = generate([(params, prompt) for prompt in PROMPTS], drafts, 20, MODEL, 3)
        for prompt, text in zip(PROMPTS, texts, strict=True):
            known = list(prompt)
            for token in text:
                probs = MODEL.logits(known).softmax(-1)
                if params is banned:
                    assert token not in (3, 7)
                else:
                    assert probs[token] >= 0.2 * probs.max() * 0.9999
                known.append(token)


def test_trap_13_a_draft_penalises_the_next_row_of_the_same_step() -> None:
    params = SamplingParams(seed=0, max_tokens=9, temperature=0.0, frequency_penalty=1.0)
    table = Table.of([(params, [1, 2], [3])], V)
    logits = torch.zeros(3, V)
    logits[:, 10], logits[:, 20] = 5.0, 4.5  # 10 wins until it has come once
    out = sampler().sample(logits, rows_of(table, [0], [[10, 20]], 2), table)
    assert out.sampled_token_ids.tolist() == [[10, 20, 10]]
    assert table.sampling.output_bin_counts is not None
    assert table.sampling.output_bin_counts[0, 10] == 0, "the drafts leaked into the state"
    wrong = sampler().sample(logits, rows_of(table, [0], [[10, 10]], 2), table)
    assert wrong.sampled_token_ids.tolist() == [[10, 20, -1]]


def test_min_tokens_is_judged_row_by_row() -> None:
    params = SamplingParams(seed=0, max_tokens=9, temperature=0.0, min_tokens=4, stop_token_ids=[9])
    table = Table.of([(params, [1, 2], [3, 3])], V)  # two emitted: rows 0 and 1 may not stop
    logits = torch.zeros(4, V)
    logits[:, 9], logits[:, 4] = 5.0, 3.0
    out = sampler().sample(logits, rows_of(table, [0], [[4, 4, 9]], 3), table)
    assert out.sampled_token_ids.tolist() == [[4, 4, 9, 9]]


def test_an_unfinished_prefill_emits_nothing() -> None:
    params = SamplingParams(seed=0, max_tokens=9)
    table = Table.of([(params, [1, 2, 3, 4], []), (params, [1, 2], [])], V)
    table.total_len[0] = 2  # a chunk that ends before the prompt does
    out = sampler().sample(torch.randn(2, V), rows_of(table, [0, 1], [[], []], 2), table)
    assert out.num_sampled.tolist() == [0, 1] and out.num_rejected.tolist() == [0, 0]
    assert out.sampled_token_ids[0].tolist() == [-1] * 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_hold_nan_or_allow_nothing_are_reported(temperature: float) -> None:
    params = SamplingParams(seed=0, max_tokens=9, temperature=temperature)
    nothing = SamplingParams(
        seed=0, max_tokens=9, temperature=temperature,
        allowed_token_ids=[4], bad_words_token_ids=[[4]],
    )  # fmt: skip
    table = Table.of([(params, [1, 2], [])] * 3 + [(nothing, [1, 2], [])], V)
    logits = torch.randn(8, V)
    logits[2, 7] = torch.nan  # request 1, row 0
    logits[5, 7] = torch.nan  # request 2, row 1: behind a rejected row, never looked at
    rows = rows_of(table, [0, 1, 2, 3], [[3], [3], [-1], [4]], 1)
    out = sampler().sample(logits, rows, table)
    assert out.has_nan.tolist() == [False, True, False, True]
    assert (out.sampled_token_ids < V).all()
    alone = sampler().sample(logits[2:3], rows_of(table, [1], [[]], 1), table)
    assert alone.has_nan.tolist() == [True]


def test_a_bad_word_does_not_begin_in_the_prompt() -> None:
    """Only output counts as the beginning of a word, the drafts of a step included."""
    asked = SamplingParams(
        seed=0, max_tokens=9, temperature=0.0, bad_words_token_ids=[[7, 9], [2, 7, 4]]
    )
    table = Table.of([(asked, [2, 7], []), (asked, [2], [7])], V)
    logits = torch.zeros(4, V)
    logits[:, 9], logits[:, 4] = 5.0, 4.0
    rows = rows_of(table, [0, 1], [[7], [7]], 2)
    processed = process_logits(logits, rows, table, None, table.sampling.features([0, 1]))
    # request 0: after the prompt, and after the draft 7; request 1: after the output 7, and 7, 7
    assert processed.argmax(-1).tolist() == [9, 4, 4, 4]


def test_logprobs_are_raw_and_the_same_with_speculation() -> None:
    asked = SamplingParams(seed=0, max_tokens=9, temperature=0.0, logprobs=3, logit_bias={4: 3.0})
    silent = SamplingParams(seed=0, max_tokens=9, temperature=0.0)
    table = Table.of([(silent, [1], []), (asked, [1, 2], [3])], V)
    logits = torch.randn(5, V, generator=torch.Generator().manual_seed(1))
    given = logits.clone()
    best = [int(expected_distribution(r.tolist(), asked, [], []).argmax()) for r in logits[2:]]
    out = sampler().sample(logits, rows_of(table, [0, 1], [[5], best[:2]], 3), table)
    assert torch.equal(logits, given), "the caller's logits were changed"
    assert out.sampled_token_ids[1].tolist() == [*best, -1]
    assert out.logprobs is not None
    for offset, token in enumerate(best):
        at = 4 + offset  # row-major [N, K + 1]
        raw = logits[2 + offset].log_softmax(-1)
        assert out.logprobs.token_ids[at] == token
        assert abs(out.logprobs.logprobs[at] - raw[token]) < 1e-5
        assert out.logprobs.ranks[at] == 1 + (raw > raw[token]).sum()
        assert out.logprobs.top_ids[at].tolist() == raw.topk(3).indices.tolist()
    none = sampler().sample(logits[:2], rows_of(table, [0], [[5]], 3), table)
    assert none.logprobs is None


def test_a_padded_vocabulary_and_low_precision_logits_are_accepted() -> None:
    params = SamplingParams(seed=0, max_tokens=9, temperature=0.0)
    table = Table.of([(params, [1, 2], [])], V)
    logits = torch.zeros(1, V + 8, dtype=torch.bfloat16)
    logits[0, V + 1], logits[0, 6] = 9.0, 1.0
    out = sampler().sample(logits, rows_of(table, [0], [[]], 0), table)
    assert out.sampled_token_ids.tolist() == [[6]]


def test_a_slot_leaves_nothing_to_its_next_request() -> None:
    heavy = SamplingParams(
        seed=0, max_tokens=9, temperature=0.7, top_p=0.5, min_p=0.1, top_k=3,
        logit_bias={4: -100.0}, allowed_token_ids=[4, 5], min_tokens=3, stop_token_ids=[6],
        presence_penalty=1.0,
        bad_words_token_ids=[[5]], logprobs=2, prediction_token_ids=[1, 2],
    )  # fmt: skip
    plain = SamplingParams(seed=0, max_tokens=9)
    other = SamplingParams(seed=1, max_tokens=9, presence_penalty=0.5, allowed_token_ids=[1, 2, 5])
    table = Table.of([(heavy, [1], [2]), (other, [1], [2])], V)
    state = table.sampling
    state.clear(0)
    assert state.features([0]) == Feature(0)
    state.set_request(0, plain, [1], [2])
    assert state.features([0]) == Feature.RANDOM | Feature.UNSEEDED
    assert state.num_logprobs[0] is None
    assert state.predictions.length[0] == 0
    fresh = Table.of([(plain, [1], [2])], V)
    logits = torch.randn(40, V)
    for row in logits:  # beside a neighbour that uses the same tables
        pair = torch.stack([row, row])
        got = sampler().sample(pair, rows_of(table, [0, 1], [[], []], 0), table)
        alone = sampler().sample(pair[:1], rows_of(fresh, [0], [[]], 0), fresh)
        assert got.sampled_token_ids[0] == alone.sampled_token_ids[0]
        table.total_len += 1
        fresh.total_len += 1


def test_tables_grow_and_keep_what_they_hold() -> None:
    state = SamplingState(3, V, CPU)

    def params(count: int) -> SamplingParams:
        return SamplingParams(
            seed=-(2**70),  # any integer is a seed
            max_tokens=9,
            logit_bias={i: float(i) for i in range(count)},
            bad_words_token_ids=[[i] * count for i in range(count)],
            min_tokens=1,
            stop_token_ids=list(range(count)),
        )

    for slot, count in enumerate((1, 3, 9)):
        state.set_request(slot, params(count), [1], [])
    for slot, count in enumerate((1, 3, 9)):
        (ids, values), exists = state.biases.padded(torch.tensor([slot]), 12)
        assert exists.sum() == count and ids[exists].tolist() == list(range(count))
        assert values.view(torch.float32)[exists].tolist() == [float(i) for i in range(count)]
        (ids,), exists = state.stop_ids.padded(torch.tensor([slot]), 12)
        assert ids[exists].tolist() == list(range(count))
        (tokens, after, first), exists = state.bad_words.padded(torch.tensor([slot]), 100)
        assert tokens[exists].tolist() == [i for i in range(count) for _ in range(count)]
        assert after[exists].tolist() == [*range(count - 1, -1, -1)] * count
        assert first[exists].tolist() == [i * count for i in range(count) for _ in range(count)]


def test_ids_outside_the_vocabulary_are_harmless() -> None:
    params = SamplingParams(
        seed=0, max_tokens=9, temperature=0.0, logit_bias={V: 5.0, -3: 1.0, 4: 9.0},
        bad_words_token_ids=[[V + 1], []], presence_penalty=0.1,
    )  # fmt: skip
    table = Table.of([(params, [1, V + 7], [2])], V)
    out = sampler().sample(torch.zeros(1, V), rows_of(table, [0], [[]], 0), table)
    assert out.sampled_token_ids.tolist() == [[4]]


def test_long_bad_words_cost_their_own_length_alone() -> None:
    state = SamplingState(64, V, CPU)
    words = [[5], *([[1] * 8_000])]
    params = SamplingParams(seed=0, max_tokens=9, bad_words_token_ids=words)
    state.set_request(0, params, [1], [])
    assert state.bad_words.entries.numel() < 3 * 4 * 8_001  # and not 64 slots of 2 words of 8,000
    state.clear(0)
    assert state.bad_words.entries.numel() < 1_000


def test_bad_words_are_compared_in_pieces_of_bounded_size(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [[3], [7, 9], [9, 7, 1], [25, 1], [2, 2, 2, 2, 2], [7, 1, 5]]
    asked = [
        (SamplingParams(seed=slot, max_tokens=9, temperature=0.0, bad_words_token_ids=some), [1], o)
        for slot, (some, o) in enumerate([(words, [9, 7]), ([], [2, 2]), (words[1:], [2, 2, 2, 7])])
    ]
    torch.manual_seed(2)
    logits, drafts = torch.randn(9, V), [[1, 9], [7, 9], [9, 7]]
    for step in (1 << 20, 17, 1):
        monkeypatch.setattr("slipstream.runner.sampling.logits_processing.MAX_WORD_ENTRIES", step)
        table = Table.of(asked, V)
        rows = rows_of(table, [0, 1, 2], drafts, 2)
        features = table.sampling.features([0, 1, 2])
        found = process_logits(logits, rows, table, None, features)
        forbidden = [{int(t) for t in (row == float("-inf")).nonzero()[:, 0]} for row in found]
        # slot 0 after 9 7, 9 7 1, 9 7 1 9; slot 2 after 2 2 2 7, 2 2 2 7 9, 2 2 2 7 9 7
        # The output 7 and the draft 1 begin a word of slot 0 that the next draft may not complete.
        assert forbidden == [{3, 9, 1}, {3, 5}, {3}, set(), set(), set(), {9}, set(), {9, 1}]


def test_more_alternatives_than_tokens_are_all_of_them() -> None:
    found = token_logprobs(torch.randn(2, V), torch.tensor([0, 1]), V + 9)
    assert found.top_ids.shape == (2, V)
