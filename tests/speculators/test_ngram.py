"""The n-gram drafter against a plain search, and its limits."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from slipstream.configs.graphs import BatchExecutionDescriptor, CUDAGraphMode
from slipstream.configs.options import ConfigError
from slipstream.configs.schema import SpeculativeConfig
from slipstream.kernels.drafts.ngram_scan import (
    Haystack,
    Predictions,
    ngram_scan_cpu,
    ngram_scan_reference,
)
from slipstream.speculators.base import DraftInputs
from slipstream.speculators.ngram import NgramSpeculator
from slipstream.speculators.registry import create_speculator

CPU = torch.device("cpu")


def plain_search(tokens: list[int], min_n: int, max_n: int, k: int) -> list[int]:
    for n in range(min(max_n, len(tokens) - 1), min_n - 1, -1):
        for end in range(len(tokens) - 1, n - 1, -1):  # most recent first
            if tokens[end - n : end] == tokens[-n:]:
                text = list(tokens)
                for i in range(k):
                    text.append(text[end + i])  # may copy what it has just written
                return text[len(tokens) :]
    return [-1] * k


def plain_prediction(
    output: list[int], predicted: list[int], min_n: int, max_n: int
) -> tuple[int, int]:
    """(match length, where it ends) in the prediction."""
    best, end_of_best = 0, 0
    padded_output, padded = [-2] * max_n + output, [-2] * max_n + predicted
    for end in range(len(predicted)):
        at = end + max_n
        n = next((n for n in range(max_n, 0, -1) if padded[at - n : at] == padded_output[-n:]), 0)
        nearer = abs(end - len(output)) < abs(end_of_best - len(output))
        if n > best or (n == best and nearer):
            best, end_of_best = n, end
    return (best, end_of_best) if best >= min_n else (0, 0)


def table_of(rows: list[list[int]], width: int = 64) -> tuple[Tensor, Tensor]:
    table = torch.randint(0, 4, (len(rows), width), dtype=torch.int32)  # garbage after the end
    for row, tokens in enumerate(rows):
        table[row, : len(tokens)] = torch.tensor(tokens)
    return table, torch.tensor([len(tokens) for tokens in rows], dtype=torch.int32)


@pytest.mark.parametrize("scan", [ngram_scan_cpu, ngram_scan_reference])
@pytest.mark.parametrize(("min_n", "max_n", "k"), [(1, 1, 3), (2, 4, 4), (1, 5, 7), (3, 3, 1)])
def test_scan_equals_a_plain_search(scan, min_n: int, max_n: int, k: int) -> None:
    torch.manual_seed(min_n + max_n)
    rows = [torch.randint(0, 3, (int(length),)).tolist() for length in torch.randint(1, 50, (200,))]
    table, lengths = table_of(rows)
    slots = torch.randperm(200)
    drafts = scan(Haystack(table, lengths), slots, lengths[slots], min_n, max_n, k)
    expected = [plain_search(rows[slot], min_n, max_n, k) for slot in slots]
    assert drafts.tolist() == expected
    assert any(row[0] >= 0 for row in expected)


@pytest.mark.parametrize("scan", [ngram_scan_cpu, ngram_scan_reference])
def test_predictions_equal_a_plain_search(scan) -> None:
    torch.manual_seed(5)
    min_n, max_n, k, count = 2, 4, 5, 300
    rows = [torch.randint(0, 4, (int(n),)).tolist() for n in torch.randint(3, 40, (count,))]
    predictions = [torch.randint(0, 4, (int(n),)).tolist() for n in torch.randint(0, 30, (count,))]
    prompts = [
        min(int(n), len(row)) for n, row in zip(torch.randint(1, 9, (count,)), rows, strict=True)
    ]
    table, lengths = table_of(rows)
    predicted, sizes = table_of(predictions, width=32)
    texts = Predictions(predicted.flatten(), torch.arange(count) * 32, sizes.long(), 32)
    haystack = Haystack(table, torch.tensor(prompts).int(), texts)
    drafts = scan(haystack, torch.arange(count), lengths, min_n, max_n, k).tolist()
    used = 0
    for row, text, prompt_len, got in zip(rows, predictions, prompts, drafts, strict=True):
        matched, end = plain_prediction(row[prompt_len:], text, min_n, max_n)
        own = next((n for n in range(max_n, 0, -1) if plain_search(row, n, n, 1)[0] >= 0), 0)
        if matched >= max(own, min_n):
            used += 1
            expected = (text[end : end + k] + [-1] * k)[:k]
        else:
            expected = plain_search(row, min_n, max_n, k)
        assert got == expected
    assert 20 < used < count


def test_a_prediction_is_drafted_from_the_first_output_token_on() -> None:
    prompt, predicted = [9, 8, 7], [20, 21, 22, 23, 24]
    table, lengths = table_of([prompt, [*prompt, 20], [*prompt, 20, 99, 22, 23]])
    ids, three = torch.tensor(predicted, dtype=torch.int32), torch.tensor([3, 3, 3])
    texts = Predictions(ids, torch.zeros_like(three), torch.full_like(three, 5), 5)
    haystack = Haystack(table, three.int(), texts)
    drafts = ngram_scan_cpu(haystack, torch.arange(3), lengths, 2, 4, 3)
    assert drafts.tolist() == [[20, 21, 22], [21, 22, 23], [24, -1, -1]]


def test_a_loop_is_drafted_beyond_the_known_tokens() -> None:
    table, lengths = table_of([[5, 1, 2, 1, 2, 1, 2]])
    drafts = ngram_scan_cpu(Haystack(table, lengths), torch.tensor([0]), lengths, 2, 3, 5)
    assert drafts.tolist() == [[1, 2, 1, 2, 1]]


@dataclass
class Host:
    max_model_len: int = 64
    max_num_reqs: int = 8
    device: torch.device = CPU


@dataclass
class Rows:
    all_token_ids: Tensor
    total_len: Tensor
    prompt_len: Tensor
    max_drafts: Tensor
    prefill_len: Tensor
    temperature: Tensor
    draft_logits: Tensor | None = None


def inputs_for(
    rows: Rows, num_sampled: list[int], mapping: list[int], num_rejected: list[int] | None = None
) -> DraftInputs:
    empty = torch.empty(0)
    return DraftInputs(
        num_reqs=len(num_sampled),
        num_tokens=len(num_sampled),
        descriptor=BatchExecutionDescriptor(CUDAGraphMode.NONE, len(num_sampled), None, None),
        idx_mapping=torch.tensor(mapping, dtype=torch.int32),
        query_start_loc=empty,
        seq_lens=empty,
        input_ids=empty,
        positions=empty,
        num_sampled=torch.tensor(num_sampled, dtype=torch.int32),
        num_rejected=torch.tensor(num_rejected or [0] * len(num_sampled), dtype=torch.int32),
        requests=rows,  # type: ignore[arg-type]
    )


def speculator(**options: object) -> NgramSpeculator:
    config = replace(SpeculativeConfig(method="ngram", num_speculative_tokens=4), **options)
    made = create_speculator(config, Host())  # type: ignore[arg-type]
    assert isinstance(made, NgramSpeculator)
    return made


def test_trap_17_drafts_stop_at_the_limits_of_request_and_model() -> None:
    loop = [1, 2, 3] * 22
    table, lengths = table_of([loop[:62], loop[:30], loop[:30], loop[:30], loop[:64]])
    caps = torch.tensor([4, 4, 0, 2, 4], dtype=torch.int32)
    rows = Rows(table, lengths, lengths, caps, lengths - 1, torch.zeros(5))
    drafts = speculator().propose(inputs_for(rows, [1, 0, 1, 5, 1], [0, 1, 2, 3, 4, -1]))
    assert drafts.tolist() == [
        [3, 1, -1, -1],  # positions 62 and 63 are the model's last
        [-1] * 4,  # a prefill chunk emitted nothing
        [-1] * 4,  # speculation is off for the request
        [1, 2, -1, -1],
        [-1] * 4,  # full
    ]
    short = speculator(max_model_len=31).propose(inputs_for(rows, [1, 1], [0, 3]))
    assert short.tolist() == [[-1] * 4, [1, -1, -1, -1]]


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_only_where_rows_are_not_padded_may_requests_differ(device: str) -> None:
    config = SpeculativeConfig(method="ngram")
    host = Host(device=torch.device(device))
    drafter = create_speculator(config, host)  # type: ignore[arg-type]
    assert drafter is not None
    assert drafter.needs.per_request_drafts == (device == "cpu")


def test_a_row_at_4k_context_costs_little() -> None:
    torch.manual_seed(0)
    table = torch.randint(0, 500, (1, 4096), dtype=torch.int32)
    lengths = torch.tensor([4096], dtype=torch.int32)
    best = float("inf")
    for _ in range(20):
        start = time.perf_counter()
        ngram_scan_cpu(Haystack(table, lengths), torch.tensor([0]), lengths, 2, 4, 4)
        best = min(best, time.perf_counter() - start)
    assert best < 0.3e-3


@pytest.mark.parametrize(
    "bad",
    [
        {"method": "nonsense"},
        {"num_speculative_tokens": 0},
        {"prompt_lookup_min": 5, "prompt_lookup_max": 4},
        {"prompt_lookup_min": 0},
    ],
)
def test_a_wrong_configuration_is_refused_with_a_sentence(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="speculative|prompt_lookup"):
        speculator(**bad)


def test_off_makes_no_speculator() -> None:
    assert create_speculator(SpeculativeConfig(), Host()) is None  # type: ignore[arg-type]
