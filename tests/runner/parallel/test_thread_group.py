"""An engine on two ranks gives the tokens and drafts of one; a rank that differs is noticed."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from slipstream.configs.schema import SpeculativeConfig
from slipstream.runner.errors import RunnerError
from slipstream.runner.parallel.commands import Execute
from slipstream.runner.parallel.group import RankFailed
from slipstream.runner.parallel.rank_processes import devices_from
from slipstream.runner.parallel.ranks import Ranks, check_equal
from slipstream.speculators.base import DraftInputs
from slipstream.speculators.ngram import NgramSpeculator

from ...cases import some
from ...speculators.all_drafters import Drafters
from ...speculators.test_example_drafter import METHOD
from ...speculators.tiny_engine import Run, TinyEngine, prompts
from .thread_group import ThreadGroup, build_on_threads
from .threads import on_ranks


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    return Drafters(tmp_path_factory.mktemp("drafters"))


def run(target: Path, spec: SpeculativeConfig, groups: list[ThreadGroup] | None, **s: Any) -> Run:
    build = {} if groups is None else {"build": partial(build_on_threads, groups)}
    engine = TinyEngine(target, spec, **build)
    try:
        return engine.run(prompts(3, longest=20), max_tokens=16, **s)
    finally:
        engine.close()


CASES = [
    (method, temperature)
    for method in ("off", "ngram", "eagle", "eagle3", "draft_model", "mtp", "gemma4_mtp")
    for temperature in (0.0, 0.8)
]


FEW = (("off", 0.0), ("eagle3", 0.0), ("mtp", 0.8), ("gemma4_mtp", 0.0))


@pytest.mark.parametrize(("method", "temperature"), some(CASES, FEW))
def test_two_ranks_emit_the_tokens_of_one(
    method: str, temperature: float, drafters: Drafters
) -> None:
    groups: list[ThreadGroup] = []
    spec = SpeculativeConfig(method=method, num_speculative_tokens=3)
    target = drafters.pair("eagle3")[0]
    if method not in ("off", "ngram"):
        target, _ = drafters.pair(method)
        spec = drafters.speculative(method, draft_sampling="auto")
    settings = {"temperature": temperature, "top_p": 0.9 if temperature else 1.0}
    alone = run(target, spec, None, **settings)
    both = run(target, spec, groups, **settings)
    assert both.tokens == alone.tokens
    assert (both.num_drafts, both.accepted_per_pos) == (alone.num_drafts, alone.accepted_per_pos)
    (group,) = groups
    steps = sum(isinstance(command, Execute) for command in group.sent)
    assert group.num_answers == steps > 5  # every step's tokens were compared
    group.check()


class DifferentDrafts(NgramSpeculator):
    """Drafts something else on each thread, and so on each rank."""

    def propose(self, inputs: DraftInputs) -> Tensor:
        drafts = super().propose(inputs)
        return torch.full_like(drafts, threading.get_ident() % 61)


@pytest.mark.parametrize("is_own", [True, False])
def test_all_ranks_verify_the_drafts_of_the_first_ranks_own_class(
    is_own: bool, drafters: Drafters, tmp_path: Path
) -> None:
    target = drafters.pair("eagle3")[0]
    spec = SpeculativeConfig(
        method=f"{__name__}:DifferentDrafts" if is_own else f"{METHOD}",
        num_speculative_tokens=3,
        model=None if is_own else str(tmp_path),
        draft_sampling="greedy",
    )
    torch.manual_seed(3)
    save_file({"weight": torch.randn(32, 64) * 0.3}, tmp_path / "model.safetensors")
    groups: list[ThreadGroup] = []
    alone = run(target, SpeculativeConfig() if is_own else spec, None)
    both = run(target, spec, groups)
    assert both.tokens == alone.tokens and both.num_drafts > 3
    assert is_own or both.accepted_per_pos == alone.accepted_per_pos
    groups[0].check()


def test_a_rank_that_draws_other_tokens_ends_the_group(
    drafters: Drafters, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[ThreadGroup] = []
    build = partial(build_on_threads, groups)
    engine = TinyEngine(drafters.pair("eagle3")[0], SpeculativeConfig(), build=build)
    (group,) = groups
    send = group.send

    def corrupted(command: Any) -> None:
        """Give the other rank another seed."""
        if isinstance(command, Execute) and command.plan.new_requests:
            new = command.plan.new_requests[0]
            kept, new.sampling = new.sampling, msgspec.structs.replace(new.sampling, seed=99)
            send(command)
            new.sampling = kept
        else:
            send(command)

    monkeypatch.setattr(group, "send", corrupted)
    with pytest.raises(RankFailed, match="rank 1 computed other tokens than rank 0"):
        engine.run(prompts(2), max_tokens=20, temperature=1.0)
        group.check()
    group._failure = None  # so that the engine waits for the steps in flight
    monkeypatch.setattr(group, "check", lambda: None)
    engine.close()


def test_grammar_masks_logprobs_and_penalties_reach_all_ranks(drafters: Drafters) -> None:
    target = drafters.pair("eagle3")[0]
    spec = drafters.speculative("eagle3")
    settings = dict(
        temperature=0.9, top_k=7, min_p=0.02, presence_penalty=0.5, repetition_penalty=1.2,
        logit_bias={3: 4.0}, logprobs=2, prompt_logprobs=1,
    )  # fmt: skip
    groups: list[ThreadGroup] = []
    alone, both = run(target, spec, None, **settings), run(target, spec, groups, **settings)
    assert both.tokens == alone.tokens
    groups[0].check()


@pytest.mark.parametrize(
    ("stated", "rank", "devices"),
    [(None, 1, "1,0"), (None, 0, "0,1"), ("4,6", 1, "6,4"), ("", 1, ""), ("3", 1, "3")],
)
def test_the_first_visible_device_is_the_ranks_own(
    stated: str | None, rank: int, devices: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if stated is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", stated)
    assert devices_from(rank, 2) == devices


def test_ranks_that_differ_at_start_up_are_an_error() -> None:
    def check(ranks: Ranks) -> None:
        check_equal(ranks, "names", "same")
        check_equal(None, "names", ranks.rank)
        with pytest.raises(RunnerError, match="the ranks differ in numbers; rank . has"):
            check_equal(ranks, "numbers", ranks.rank)

    on_ranks(2, check)
