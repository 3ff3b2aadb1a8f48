"""`verify` passes a sound engine and finds faults planted in verification, grammars, logprobs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from slipstream.kernels.sampling import verify as rejection
from slipstream.kernels.sampling.sample import ACCEPT
from slipstream.runner.attention import reference
from slipstream.runner.engine.request_grammars import RequestGrammars
from slipstream.runner.grammars.pool import build_grammar_backend
from slipstream.runner.messages import GrammarSpec
from slipstream.runner.sampling import sampler
from slipstream.server.verify.plan import Plan, Subject
from slipstream.server.verify.report import Report
from slipstream.server.verify.run import run_checks

from .in_process import InProcess, V, save_pair, start

TOKENS = [b"", *(bytes([97 + n]) for n in range(V - 1))]
GRAMMAR = GrammarSpec("regex", "[a-f]{1,40}")
PROMPTS = [[1, 4, 2], *([n, n + 5, (7 * n) % V, 3] for n in range(1, 5))]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[InProcess]:
    """Its drafts are unlikely tokens, so that few replies show a bias towards them."""
    target, head = save_pair(tmp_path_factory.mktemp("pair"), rare=True)
    found = start(target, "eagle3", head)
    found.tiny.engine.set_grammar_backend(build_grammar_backend(TOKENS, "raw", [0], V))
    yield found
    found.tiny.close()


def run(engine: InProcess, **plan: Any) -> Report:
    """The report of a short run."""
    subject = Subject(
        prompts=PROMPTS, stop_token_ids=[], vocab_size=V, dtype="float32",
        method="eagle3", one_hot=True, grammar=GRAMMAR, valid=lambda ids: max(ids, default=0) <= 6,
    )  # fmt: skip
    report = Report({})
    options = {"num_prompts": 4, "max_tokens": 10, "num_samples": 16, "options": ()} | plan
    asyncio.run(run_checks(engine, subject, Plan(**options), report))
    return report


def failed(report: Report) -> set[str]:
    return {check.name for check in report.checks if check.status == "fail"}


def test_a_sound_engine_passes_every_check(engine: InProcess) -> None:
    report = run(engine)
    assert report.passes, report.table()
    names = {check.name for check in report.checks if check.status == "pass"}
    assert {
        "all requests at once",
        "penalties",
        "grammar is obeyed",
        "seed repeats the text",
    } <= names
    judged = next(c for c in report.checks if c.name == "all options: the judged draft")
    assert judged.figures["trials"] > 500


def test_a_bias_of_one_percent_in_rejection_sampling_is_found(
    engine: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each draft is accepted with probability p / q + 0.01."""
    uniform: Callable[..., Tensor] = rejection.uniform

    def lenient(seeds: Tensor, positions: Tensor, salt: int) -> Tensor:
        drawn = uniform(seeds, positions, salt)
        return (drawn - 0.01).clamp(min=1e-9) if salt == ACCEPT else drawn

    monkeypatch.setattr(rejection, "uniform", lenient)
    report = run(
        engine,
        num_samples=480,
        round_samples=480,
        checks_drafts=False,
        num_prompts=1,
        options=("temperature 1",),
    )
    assert "all options: the judged draft" in failed(report), report.table()
    judged = next(c for c in report.checks if c.name == "all options: the judged draft")
    assert judged.figures["bias"] == pytest.approx(0.01, abs=0.006)


@pytest.mark.slow
def test_the_default_run_finds_a_bias_of_one_percent_in_all_options_together(
    engine: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = Plan()
    sizes = {name: getattr(plan, name) for name in ("num_prompts", "max_tokens", "num_samples")}
    sizes["round_samples"] = 256  # fewer, larger batches; the same replies
    assert run(engine, **sizes).passes
    uniform: Callable[..., Tensor] = rejection.uniform

    def lenient(seeds: Tensor, positions: Tensor, salt: int) -> Tensor:
        drawn = uniform(seeds, positions, salt)
        return (drawn - 0.01).clamp(min=1e-9) if salt == ACCEPT else drawn

    monkeypatch.setattr(rejection, "uniform", lenient)
    assert "all options: the judged draft" in failed(run(engine, **sizes))


def test_a_stale_kv_row_of_the_target_is_found(
    engine: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In verify steps, the first row keeps what a rejected draft has left in its slot."""
    store: Callable[..., None] = reference.store_kv_reference

    def stale(key: Tensor, value: Tensor, cache: Tensor, slots: Tensor, **options: Any) -> None:
        first = int(1 < len(slots) <= 3)  # prompts and the prefills of scores are longer
        store(key[first:], value[first:], cache, slots[first:], **options)

    monkeypatch.setattr(reference, "store_kv_reference", stale)
    report = run(engine, num_samples=0, num_prompts=2, checks_drafts=False)
    assert "one request at a time" in failed(report), report.table()


def test_when_the_time_is_over_fewer_replies_are_compared(engine: InProcess) -> None:
    report = run(
        engine, num_samples=40, minutes=1e-9, options=("temperature 1",), checks_drafts=False
    )
    assert report.setup["sampled_replies"] == 16 and report.passes


def test_a_grammar_that_binds_one_token_late_is_found(
    engine: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row has the mask of the row before it."""
    bitmask: Callable[..., Any] = RequestGrammars.bitmask

    def late(self: RequestGrammars, *args: Any) -> Any:
        mask, num_cut = bitmask(self, *args)
        shifted = mask.copy()
        shifted[1:], shifted[0] = mask[:-1], -1
        return shifted, num_cut

    monkeypatch.setattr(RequestGrammars, "bitmask", late)
    report = run(engine, options=("grammar",), num_prompts=1, checks_drafts=False)
    assert "grammar" in failed(report), report.table()


def test_logprobs_taken_after_the_penalties_are_found(
    engine: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The API promises the model's own, before any option."""
    process: Callable[..., Tensor] = sampler.process_logits

    def in_place(raw: Tensor, *args: Any) -> Tensor:
        logits = process(raw, *args)
        raw.copy_(torch.where(logits.isinf(), raw, logits))
        return logits

    monkeypatch.setattr(sampler, "process_logits", in_place)
    report = run(engine, num_samples=0, num_prompts=2, checks_drafts=False)
    assert "with drafts" in failed(report), report.table()
