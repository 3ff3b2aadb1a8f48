"""Sampling on a GPU: same tokens as on the CPU, no waiting, and kernels equal their references."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "runner"))

from sampler_harness import CPU, Table, rows_of, rows_on  # noqa: E402

from slipstream.configs.schema import SpeculativeConfig  # noqa: E402
from slipstream.kernels.drafts.draw_drafts import draw_drafts, draw_drafts_reference  # noqa: E402
from slipstream.kernels.drafts.ngram_scan import (
    Haystack,
    Predictions,
    ngram_scan,
    ngram_scan_reference,
)
from slipstream.kernels.sampling.sample import DRAFT, gumbel_sample, gumbel_sample_reference
from slipstream.kernels.sampling.verify import (
    VerifyRows,
    rejection_sample,
    rejection_sample_reference,
)
from slipstream.runner.messages import SamplingParams  # noqa: E402
from slipstream.runner.sampling.sampler import Sampler  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
CUDA = torch.device("cuda", 0)
V = 5000
OPTIONS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"top_k": 7},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"repetition_penalty": 1.5, "temperature": 0.0},
    {"logit_bias": {5: 6.0, 7: -100.0}, "logprobs": 3},
    {"allowed_token_ids": list(range(0, V, 7))},
    {"bad_words_token_ids": [[9], [4, 11]], "temperature": 0.0, "logprobs": 0},
    {"min_tokens": 5, "stop_token_ids": [3, 8, 10]},
    {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "temperature": 1.4, "presence_penalty": 0.3},
]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Make any wait for the GPU inside the block an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("rule", ["standard", "coupled"])
@pytest.mark.parametrize("kind", ["one_hot", "probabilistic"])
def test_a_mixed_batch_samples_the_cpus_tokens_and_never_waits(kind: str, rule: str) -> None:
    torch.manual_seed(1)
    requests = [
        (SamplingParams(seed=i, max_tokens=9, **of), [1, 2, 3], [4, 9])  # type: ignore[arg-type]
        for i, of in enumerate(OPTIONS)
    ]
    count = len(requests)
    tables = {device: Table.of(requests, V, device) for device in (CPU, CUDA)}
    drafts = [torch.randint(0, 3, (i % 4,)).tolist() for i in range(count)]
    rows = rows_of(tables[CPU], torch.randperm(count).tolist(), drafts, 3)
    logits = torch.randn(int(rows.cu_num_logits[-1]), V)
    logits[:, :12] += 6.0
    logits[:, :3] += 4.0
    if kind == "probabilistic":
        stored = torch.randn(count, 3, V)
        stored[:, :, :3] += 8.0
        for device, table in tables.items():
            table.draft_logits = stored.to(device)
    mask = torch.full((logits.shape[0], -(-V // 32)), -1, dtype=torch.int32)
    mask[::2, 0] = 0x0FF7
    sampler = {d: Sampler(SpeculativeConfig(rejection_sampling=rule), d) for d in (CPU, CUDA)}
    expected = sampler[CPU].sample(logits, rows, tables[CPU], mask)
    moved, on_gpu, mask = rows_on(rows, CUDA), logits.to(CUDA), mask.to(CUDA)
    sampler[CUDA].sample(on_gpu, moved, tables[CUDA], mask)  # compiles
    torch.cuda.synchronize()
    with no_waiting():
        got = sampler[CUDA].sample(on_gpu, moved, tables[CUDA], mask)
    assert torch.equal(got.sampled_token_ids.cpu(), expected.sampled_token_ids)
    assert torch.equal(got.num_sampled.cpu(), expected.num_sampled)
    assert torch.equal(got.num_rejected.cpu(), expected.num_rejected)
    assert not got.has_nan.any() and int(expected.num_sampled.max()) > 1
    assert got.logprobs is not None and expected.logprobs is not None
    torch.testing.assert_close(
        got.logprobs.logprobs.cpu(), expected.logprobs.logprobs, atol=1e-4, rtol=1e-4
    )


def test_compiled_gumbel_sample_equals_the_reference() -> None:
    torch.manual_seed(2)
    logits = torch.randn(64, 128256, device=CUDA) * 3
    seeds = torch.randint(-(2**62), 2**62, (64,), device=CUDA)
    positions = torch.arange(64, device=CUDA)
    greedy = positions % 5 == 0
    expected = gumbel_sample_reference(logits, seeds, positions, DRAFT, greedy)
    assert torch.equal(gumbel_sample(logits, seeds, positions, DRAFT, greedy), expected)


@pytest.mark.parametrize("mapped", [True, False])
def test_compiled_drafts_and_their_distributions_equal_the_references(mapped: bool) -> None:
    count, num_drafts, vocab_size = 40, 3, 128256
    size = 32000 if mapped else vocab_size
    found = []
    for draw in (draw_drafts, draw_drafts_reference):
        torch.manual_seed(5)
        to_target = torch.randperm(vocab_size, device=CUDA)[:size] if mapped else None
        rows = torch.arange(count, device=CUDA)
        slots = torch.where(rows < 37, torch.randperm(count, device=CUDA), -1)
        of = SimpleNamespace(
            idx_mapping=slots.int(),
            temperature=(rows % 4) * 0.4,
            seed=torch.randint(-(2**62), 2**62, (count,), device=CUDA),
            noise_positions=rows * 7,
            step=torch.zeros_like(rows),
            draft_tokens=torch.full((count, num_drafts), -1, device=CUDA),
            decode_ids=torch.zeros_like(rows).int(),
        )
        kept = torch.full((count, num_drafts, vocab_size), -torch.inf, device=CUDA)
        for _ in range(num_drafts):
            draw(torch.randn(count, size, device=CUDA).bfloat16() * 3, of, to_target, kept)
        found.append([*vars(of).values(), kept])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))
    drawing = ((slots >= 0) & (rows % 4 > 0)).sum()
    assert int(kept.isfinite().sum()) == int(drawing) * num_drafts * size


@pytest.mark.parametrize("kind", ["one_hot", "probabilistic"])
def test_compiled_rejection_sample_equals_the_reference(kind: str) -> None:
    torch.manual_seed(3)
    count, width, vocab_size, draft_vocab = 64, 4, 128256, 128000
    num_rows = count * width
    local = torch.arange(width, device=CUDA).repeat(count)
    slots = torch.randperm(count, device=CUDA).repeat_interleave(width)
    logits = torch.randn(num_rows, vocab_size, device=CUDA)
    logits[:, :2] += 15.0
    stored = torch.randn(count, width - 1, draft_vocab, device=CUDA)
    stored[:, :, :2] += 15.0
    drafts = torch.randint(0, 2, (num_rows,), device=CUDA)
    drafts[(local == width - 1) | (torch.rand(num_rows, device=CUDA) < 0.1)] = -1
    rows = VerifyRows(
        logits=logits,
        draft_ids=drafts,
        draft_logits=stored if kind == "probabilistic" else None,
        slots=slots.int(),
        local_pos=local.int(),
        cu_num_logits=torch.arange(count + 1, device=CUDA, dtype=torch.int32) * width,
        seeds=slots.long() * 77,
        positions=local + 5,
        greedy=slots % 6 == 0,
        all_greedy=False,
        any_greedy=True,
        width=width,
    )
    emitted, accepted = rejection_sample(rows)
    expected, expected_accepted = rejection_sample_reference(rows)
    assert torch.equal(accepted, expected_accepted)
    assert torch.equal(emitted, expected)
    assert accepted.unique().numel() == width
    # logits as the head wrote them, with temperatures, and seeds for some requests
    temperature = torch.where(rows.greedy, 0.0, torch.rand(num_rows, device=CUDA) + 0.5)
    raw = replace(
        rows, logits=logits.bfloat16(), temperature=temperature, drawn=drafts.clamp(min=0),
        seeded=torch.arange(count, device=CUDA) % 3 // 2,
    )  # fmt: skip
    got, wanted = rejection_sample(raw), rejection_sample_reference(raw)
    assert all(torch.equal(*pair) for pair in zip(got, wanted, strict=True))


def test_compiled_ngram_scan_equals_the_reference() -> None:
    torch.manual_seed(4)

    def table(width: int) -> Tensor:
        return torch.randint(0, 6, (32, width), dtype=torch.int32, device=CUDA)

    lengths = torch.randint(1, 4097, (32,), device=CUDA).int()
    sizes = torch.randint(0, 1001, (32,), device=CUDA)
    prompts = torch.minimum(lengths, torch.full_like(lengths, 30))
    starts = torch.arange(32, device=CUDA) * 1000
    texts = Predictions(table(1000).flatten(), starts, sizes, 1000)
    haystack = Haystack(table(4096), prompts, texts)
    slots = torch.randperm(32, device=CUDA)
    args = (haystack, slots, lengths[slots], 2, 6, 5)
    expected = ngram_scan_reference(*args)
    with no_waiting():
        drafts = ngram_scan(*args)
    assert torch.equal(drafts, expected)
    assert (expected >= 0).any()
