"""Known faults of drafters with a model ("traps"), numbered from 1 to 20.

Traps 3, 5 and 6 are in test_drafter_graphs, 8 and 9 in test_gemma4, 11 in test_mtp and test_eagle,
15 and 17 also in test_prefix_and_limits, 16 in test_data_parallel_engine, the others in runner/.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from slipstream.configs.schema import SpeculativeConfig
from slipstream.runner.drafters.draft_graphs import DraftGraphs
from slipstream.runner.messages import (
    AddRequest,
    RequestOutput,
    ResetPrefixCache,
    SamplingParams,
    unpack_logprobs,
)
from slipstream.speculators.base import DraftInputs
from slipstream.speculators.eagle import EagleSpeculator

from ..cases import some
from .all_drafters import FEW_METHODS, METHODS, Drafters
from .eagle_oracle import HeadOracle, head_weights, save_head
from .recorded_graphs import graph_engine
from .recorded_proposals import made_drafts, recorded_proposals
from .tiny_engine import MAX_LEN, VOCAB, TinyEngine, prompts, save_llama


@pytest.fixture(scope="module")
def drafters(tmp_path_factory: pytest.TempPathFactory) -> Drafters:
    return Drafters(tmp_path_factory.mktemp("drafters"))


def collect(engine: TinyEngine, asked: Sequence[AddRequest]) -> dict[str, list[RequestOutput]]:
    """All outputs by request."""
    engine.engine.handle(list(asked))
    outputs: dict[str, list[RequestOutput]] = {request.request_id: [] for request in asked}
    while engine.engine.has_work():
        for step in engine.engine.step():
            for output in step.outputs:
                assert output.error is None, output.error
                outputs[output.request_id].append(output)
    return outputs


def tokens_of(outputs: dict[str, list[RequestOutput]]) -> dict[str, list[int]]:
    return {key: [t for o in parts for t in o.token_ids] for key, parts in outputs.items()}


# --- self-draft, traps 3 and 7 ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("k", "graphs"),
    some(
        [(1, False), (7, False), *((k, True) for k in range(1, 8))],
        kept=[(1, True), (7, True)],
    ),
)
def test_trap_03_a_copy_of_the_target_is_right_at_every_position(
    drafters: Drafters, k: int, graphs: bool
) -> None:
    target = drafters.pair("draft_model")[0]
    config = SpeculativeConfig(
        method="draft_model", model=str(target), num_speculative_tokens=k, draft_sampling="greedy"
    )
    with graph_engine(target, config, graphs) as engine:
        run = engine.run(prompts(4, seed=k), max_tokens=1 + 2 * (k + 1))
        assert ("draft loop" in engine.replays) == graphs
    assert run.num_drafts == 4 * 2
    assert run.acceptance() == [1.0] * k  # the oracle asks for 0.98


# --- roll-back --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", FEW_METHODS)
def test_drafts_after_each_number_of_accepted_drafts_equal_a_fresh_request(
    drafters: Drafters, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    k, target = 3, drafters.pair(method)[0]
    truth = TinyEngine(target, SpeculativeConfig())
    text = truth.run(prompts(2), max_tokens=24).tokens
    truth.close()
    whole = {tuple(p): [*p, *text[str(i)]] for i, p in enumerate(prompts(2))}
    propose, accepted = DraftGraphs.propose, set()
    own: list[tuple[list[int], list[int]]] = []
    rounds = 0

    def scripted(self: Any, inputs: DraftInputs) -> None:
        """Records the drafter's own drafts, and stores `right` true tokens and then wrong ones."""
        nonlocal rounds
        propose(self, inputs)
        drafts = made_drafts(self, inputs)
        for row in range(inputs.num_reqs):
            slot = int(inputs.idx_mapping[row])
            table: Any = inputs.requests
            known = table.all_token_ids[slot, : int(table.total_len[slot])].tolist()
            if not int(inputs.num_sampled[row]):
                continue
            own.append((known, drafts[row].tolist()))
            accepted.add(int(inputs.num_sampled[row]) - 1)
            right, rounds = rounds % (k + 1), rounds + 1
            text = next(t for p, t in whole.items() if known[: len(p)] == list(p))
            follows = (text[len(known) : len(known) + k] + [0] * k)[:k]
            for step in range(k):
                draft = follows[step] if step < right else (follows[step] + 1) % 61
                table.draft_tokens[slot, step] = draft

    monkeypatch.setattr(DraftGraphs, "propose", scripted)
    engine = TinyEngine(target, drafters.speculative(method, k))
    engine.run(prompts(2), max_tokens=24)
    engine.close()
    monkeypatch.setattr(DraftGraphs, "propose", propose)
    assert accepted == set(range(k + 1))
    sample = own[:: max(1, len(own) // 4)]
    fresh = TinyEngine(target, drafters.speculative(method, k))
    for known, drafts in sample:
        if len(known) == 1:
            continue
        fresh.engine.handle([ResetPrefixCache()])
        with recorded_proposals() as seen:
            fresh.run([known[:-1]], max_tokens=2)
        assert seen[0] == (known, drafts)
    fresh.close()


# --- trap 10 ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "taps"),
    [
        ({}, (2, 4, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}, (2, 4, 5)),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}, (2, 4, 5)),  # outputs of layers
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [3, 6, 8]}}, (3, 6, 8)),
    ],
)
def test_trap_10_tap_convention_marker_model(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    config: dict[str, Any],
    taps: tuple[int, ...],
) -> None:
    """Layer b adds 2^b, so the stream after b layers is 2^b - 1 and shows its boundary."""
    target = save_llama(tmp_path / "target", layers=8)
    head = save_head(tmp_path / "head", head_weights(True), True, **config)
    seen: list[Tensor] = []
    select = EagleSpeculator.select_target_hidden

    def watched(self: EagleSpeculator, inputs: DraftInputs) -> Tensor:
        seen.append(select(self, inputs))
        return seen[-1]

    monkeypatch.setattr(EagleSpeculator, "select_target_hidden", watched)
    speculative = SpeculativeConfig(method="eagle3", model=str(head), num_speculative_tokens=2)
    with caplog.at_level(logging.INFO, "slipstream"):
        engine = TinyEngine(target, speculative)
    model: Any = engine.engine._runner._target.model  # type: ignore[attr-defined]
    model.embed_tokens.weight.zero_()

    def marker(b: int) -> Any:
        def forward(hidden: Tensor, residual: Any, *rest: Any) -> tuple[Tensor, Tensor]:
            stream = hidden if residual is None else hidden + residual
            return torch.full_like(stream, 2.0**b), stream

        return forward

    for b, block in enumerate(model._blocks):
        monkeypatch.setattr(block, "forward", marker(b))
    engine.run([[1, 2, 3]], max_tokens=3)
    engine.close()
    assert seen and all(
        tap[0].tolist() == [2.0**b - 1 for b in taps for _ in range(32)] for tap in seen
    )
    lines = [r for r in caplog.records if "auxiliary hidden states" in r.getMessage()]
    assert len(lines) == 1 and str(list(taps)) in lines[0].getMessage()
    # a default that may be wrong is a warning
    assert lines[0].levelno == (logging.INFO if config else logging.WARNING)


# --- traps 12 and 13 --------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "trap_12_bias": {"logit_bias": {7: -100.0, 9: 3.0}},
    "trap_12_min_p": {"min_p": 0.2},
    "trap_13_repetition": {"repetition_penalty": 1.6},
    "trap_13_presence_and_frequency": {"presence_penalty": 1.1, "frequency_penalty": 0.7},
    "trap_13_min_tokens": {"min_tokens": 15, "stop_token_ids": list(range(0, VOCAB, 2))},
    "bad_words": {"bad_words_token_ids": [[t] for t in range(0, 30, 3)] + [[5, 7], [31, 32]]},
    "allowed": {"allowed_token_ids": list(range(20, 50))},
}


@pytest.fixture(scope="module")
def drafted_and_alone(
    drafters: Drafters, request: pytest.FixtureRequest
) -> Iterator[tuple[TinyEngine, TinyEngine]]:
    """Engines of one target with and without a drafter; for all options."""
    target = drafters.pair(request.param)[0]
    own = drafters.speculative(request.param, 3)
    # half the prompts meet a drafter that is mostly right, where accepted rows must be processed
    config = own if request.param == "eagle3" else SpeculativeConfig(
        method="draft_model", model=str(target), num_speculative_tokens=3
    )  # fmt: skip
    drafted, alone = TinyEngine(target, config), TinyEngine(target, SpeculativeConfig())
    yield drafted, alone
    drafted.close()
    alone.close()


@pytest.mark.parametrize(
    ("drafted_and_alone", "option"),
    some(
        [(method, option) for method in ("eagle3", "draft_model") for option in OPTIONS],
        kept=[
            *(("eagle3", option) for option in ("trap_13_min_tokens", "bad_words", "allowed")),
            *(("draft_model", option) for option in OPTIONS if option.startswith("trap")),
        ],
    ),
    indirect=["drafted_and_alone"],
)
def test_options_under_speculation_equal_off(
    drafted_and_alone: tuple[TinyEngine, TinyEngine], option: str
) -> None:
    """Greedy text and the logprobs of every emitted token, 5 alternatives beside each."""
    asked = [
        AddRequest(
            str(i), prompt, SamplingParams(i, 18, temperature=0.0, logprobs=5, **OPTIONS[option])
        )
        for i, prompt in enumerate(prompts(4, seed=6))
    ]
    drafted, alone = drafted_and_alone
    got, wanted = collect(drafted, asked), collect(alone, asked)
    assert tokens_of(got) == tokens_of(wanted)
    for key, parts in wanted.items():
        mine = [entry for part in got[key] for entry in part.logprobs or []]
        theirs = [entry for part in parts for entry in part.logprobs or []]
        assert len(mine) == len(theirs) == len(tokens_of(wanted)[key])
        for a, b in zip(mine, theirs, strict=True):
            assert (a.token_id, a.rank) == (b.token_id, b.rank)
            assert abs(a.logprob - b.logprob) < 0.05
            assert (
                max(abs(x - y) for x, y in zip(a.top_logprobs, b.top_logprobs, strict=True)) < 0.05
            )


# --- trap 15 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", some(METHODS, ("eagle3",)))  # test_mtp, test_gemma4: others
def test_trap_15_drafts_after_a_prefix_hit_equal_a_cold_run(
    drafters: Drafters, method: str
) -> None:
    target = drafters.pair(method)[0]
    prefix = [*prompts(1, seed=4, longest=60)[0], *range(40)]
    turn = prefix + [7, 8, 9, 7]
    with recorded_proposals() as cold:
        engine = TinyEngine(target, drafters.speculative(method))
        engine.run([turn], max_tokens=8)
        engine.close()
    engine = TinyEngine(target, drafters.speculative(method))
    engine.run([prefix], max_tokens=3)
    with recorded_proposals() as hit:
        run = engine.run([turn], max_tokens=8)
    engine.close()
    assert run.cached_tokens["0"] >= len(prefix) - 2 * 4
    assert hit == cold


# --- trap 17 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("k", some(range(1, 8), (2, 7)))
def test_trap_17_eight_requests_run_to_the_end_of_the_context(drafters: Drafters, k: int) -> None:
    method = "eagle" if k % 2 else "draft_model"
    target = drafters.pair(method)[0]
    lengths = [MAX_LEN - 10 - i for i in range(8)]
    generator = torch.Generator().manual_seed(k)
    asked = [
        AddRequest(
            str(i), torch.randint(VOCAB, (n,), generator=generator).tolist(),
            SamplingParams(i, MAX_LEN - n, temperature=0.0),
        )
        for i, n in enumerate(lengths)
    ]  # fmt: skip
    alone = TinyEngine(target, SpeculativeConfig())
    drafted = TinyEngine(target, drafters.speculative(method, k))
    got, wanted = collect(drafted, asked), collect(alone, asked)
    alone.close()
    drafted.close()
    assert tokens_of(got) == tokens_of(wanted)
    assert [len(t) for t in tokens_of(got).values()] == [MAX_LEN - n for n in lengths]
    assert sum(o.num_draft_tokens for parts in got.values() for o in parts) > 0


def test_trap_17_a_shorter_drafter_stops_for_long_requests_alone(drafters: Drafters) -> None:
    limit, k = 40, 3
    target = drafters.pair("draft_model")[0]
    config = SpeculativeConfig(
        method="draft_model", model=str(target), num_speculative_tokens=k, max_model_len=limit,
        draft_sampling="greedy",
    )  # fmt: skip
    long, short = list(range(50)), [3, 1, 4]
    engine = TinyEngine(target, config)
    with recorded_proposals() as seen:
        run = engine.run([long, short, long[:30]], max_tokens=17)
    engine.close()
    alone = TinyEngine(target, SpeculativeConfig())
    assert run.tokens == alone.run([long, short, long[:30]], max_tokens=17).tokens
    alone.close()
    for tokens, drafts in seen:
        # the row of position p drafts; the newest token stands at len - 1, its predecessor at p
        known = [len(tokens) - 2 + step < limit for step in range(k)]
        assert [draft >= 0 for draft in drafts] == known
    assert {len(tokens) > limit + 1 for tokens, _ in seen} == {True, False}


# --- trap 18 ----------------------------------------------------------------------------------


def test_trap_18_a_drafter_with_other_heads_equals_transformers(
    drafters: Drafters, tmp_path: Path
) -> None:
    """Eight query heads of four under a target with four of eight; the draft model's own groups."""
    target = drafters.pair("draft_model")[0]
    draft = save_llama(tmp_path, seed=5, layers=2, heads=8)
    oracle = LlamaForCausalLM.from_pretrained(draft).eval()
    config = SpeculativeConfig(
        method="draft_model", model=str(draft), num_speculative_tokens=3, draft_sampling="greedy"
    )
    engine = TinyEngine(target, config)
    groups = engine.engine._runner._target.cache.groups  # type: ignore[attr-defined]
    assert [g.head_dim for g in groups] == [8, 4]
    with recorded_proposals() as seen:
        engine.run(prompts(4), max_tokens=10)
    engine.close()
    assert len(seen) > 16
    for tokens, drafts in seen:
        known = list(tokens)
        for draft_id in drafts:
            with torch.no_grad():
                known.append(int(oracle(torch.tensor([known])).logits[0, -1].argmax()))
            assert draft_id == known[-1]


def test_trap_18_an_eagle_head_with_more_heads_than_the_target(tmp_path: Path) -> None:
    target = save_llama(tmp_path / "target", layers=8, heads=2)
    weights = head_weights(eagle3=True)  # four heads of eight; the target has two of sixteen
    head = save_head(tmp_path / "head", weights, True)
    config = SpeculativeConfig(
        method="eagle3", model=str(head), num_speculative_tokens=3, draft_sampling="greedy"
    )
    engine = TinyEngine(target, config)
    with recorded_proposals() as seen:
        engine.run(prompts(3), max_tokens=8)
    engine.close()
    oracle = HeadOracle(target, weights, True, (2, 4, 5))
    assert len(seen) > 10
    assert all(drafts == oracle.drafts(tokens, 3) for tokens, drafts in seen)


# --- trap 20 ----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", some(("mtp", "eagle"), ("eagle",)))
def test_trap_20_prompt_logprobs_survive_the_drafter(drafters: Drafters, method: str) -> None:
    """Eight parallel prompts in chunks, with graphs: each sum equals the one without a drafter."""
    target = drafters.pair(method)[0]
    asked = [
        AddRequest(str(i), prompt, SamplingParams(i, 3, temperature=0.0, prompt_logprobs=0))
        for i, prompt in enumerate(prompts(8, seed=8, longest=60))
    ]
    scheduler = {"max_num_batched_tokens": 24, "max_num_seqs": 4}
    with graph_engine(target, drafters.speculative(method), scheduler=scheduler) as engine:
        got = collect(engine, asked)
    alone = TinyEngine(target, SpeculativeConfig(), scheduler=scheduler)
    wanted = collect(alone, asked)
    alone.close()
    for key, request in zip(got, asked, strict=True):
        mine, theirs = prompt_logprob(got[key]), prompt_logprob(wanted[key])
        assert mine == pytest.approx(theirs, rel=5e-3, abs=1e-3)
        assert len(request.prompt_token_ids) == 1 or theirs < 0


def prompt_logprob(outputs: list[RequestOutput]) -> float:
    found = [o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None]
    assert len(found) == 1
    return sum(entry.logprob for entry in unpack_logprobs(found[0]) if entry is not None)


# --- per request ------------------------------------------------------------------------------


@pytest.mark.parametrize("method", some(METHODS, ("eagle3",)))
def test_a_request_can_turn_drafting_off_or_cap_it(drafters: Drafters, method: str) -> None:
    """The others draft as before and everything still runs in graphs."""
    asked = prompts(4, seed=3)
    wishes: list[dict[str, Any]] = [
        {},
        {"speculative_enabled": False},
        {"speculative_max_tokens": 1},
        {"speculative_max_tokens": 0},
    ]
    requests = [
        AddRequest(str(i), prompt, SamplingParams(i, 16, temperature=0.0, **wish))
        for i, (prompt, wish) in enumerate(zip(asked, wishes, strict=True))
    ]
    target = drafters.pair(method)[0]
    with graph_engine(target, drafters.speculative(method, 3)) as engine:
        got = collect(engine, requests)
        replays = dict(engine.replays)
    alone = TinyEngine(target, SpeculativeConfig())
    assert tokens_of(got) == alone.run(asked, max_tokens=16).tokens
    alone.close()
    most = [max(output.num_draft_tokens for output in got[str(i)]) for i in range(4)]
    assert most == [3, 0, 1, 0]
    assert replays["target"] > 4 and replays["draft loop"] > 4  # no fall-back to eager
