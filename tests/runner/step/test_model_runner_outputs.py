"""What a step hands to the host: logprobs, drafts for grammars, errors; and what its options do."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plan_maker import PlanMaker, greedy
from tiny_target import MAX_LEN, VOCAB, Oracle, TinySetup, make_runner, tiny_llama

from slipstream.configs.schema import CacheConfig, Config, ModelConfig, SchedulerConfig
from slipstream.runner.messages import Progress, SamplingParams
from slipstream.runner.scheduling.plan import NewRequest, RowResult, ScheduledRow, StepPlan
from slipstream.runner.startup.build import build_model_runner
from slipstream.runner.startup.memory import NoKVMemory
from slipstream.runner.step.model_runner import ModelRunner


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_llama()


@pytest.fixture(scope="module")
def oracle(model: Any) -> Oracle:
    return Oracle(model)


def start(slot: int, tokens: list[int], sampling: SamplingParams) -> NewRequest:
    blocks = list(range(1 + 8 * slot, 9 + 8 * slot))
    return NewRequest(slot, tokens, len(tokens), 0, [blocks], sampling)


def run(runner: ModelRunner, plan: StepPlan) -> list[RowResult]:
    results = runner.execute(plan).get()
    runner.synchronize()
    return results


def expected_logprobs(logits: torch.Tensor, token: int, top: int) -> tuple[float, int, list[int]]:
    logprobs = logits.log_softmax(-1)
    rank = int((logprobs > logprobs[token]).sum()) + 1
    return float(logprobs[token]), rank, logprobs.topk(top).indices.tolist()


def test_prompt_logprobs_over_chunks_equal_recomputation(model: Any, oracle: Oracle) -> None:
    prompt = [5, 9, 31, 2, 44, 60, 7, 7, 12]
    # The drafter is not allowed to disturb them, so one is there.
    runner = make_runner(model, TinySetup(num_drafts=2), lambda slot, known: [1, 2])
    runner._prompt_logprobs._chunk_rows = 3  # several pieces per chunk
    new = start(1, prompt, greedy(prompt_logprobs=2))
    plans = [
        StepPlan(0, new_requests=[new], rows=[ScheduledRow(1, 5, 0, 0, True, 0)]),
        StepPlan(1, rows=[ScheduledRow(1, 4, 0, 5, False, 0)]),
        StepPlan(2, rows=[ScheduledRow(1, 1, 0, 9, False, 1)]),
    ]
    results = [run(runner, plan)[0] for plan in plans]
    runner.shutdown()
    assert results[2].prompt_logprobs is None
    found = [*(results[0].prompt_logprobs or []), *(results[1].prompt_logprobs or [])]
    assert [entry[0] for entry in found] == prompt[1:]
    logits = oracle.logits(prompt)
    for position, (token, logprob, rank, top_ids, top_logprobs) in enumerate(found):
        expected, expected_rank, ids = expected_logprobs(logits[position], token, 2)
        assert logprob == pytest.approx(expected, abs=1e-4)
        assert (rank, top_ids) == (expected_rank, ids)
        assert len(top_logprobs) == 2


def test_every_emitted_token_has_its_logprobs(model: Any, oracle: Oracle) -> None:
    prompt = [3, 1, 4, 1, 5]
    runner = make_runner(
        model, TinySetup(num_drafts=2), lambda slot, known: oracle.continuation(known, 2)
    )
    news = [start(0, prompt, greedy(logprobs=3)), start(1, prompt, greedy())]
    rows = [ScheduledRow(slot, 5, 0, 0, False, 0) for slot in (0, 1)]
    first = run(runner, StepPlan(0, new_requests=news, rows=rows))
    rows = [ScheduledRow(slot, 3, 2, 5, False, 1) for slot in (1, 0)]
    second = run(runner, StepPlan(1, rows=rows))
    runner.shutdown()
    text = oracle.continuation(prompt, 4)
    assert first[0].token_ids + second[1].token_ids == text
    assert first[1].logprobs is None and second[0].logprobs is None
    found = [*(first[0].logprobs or []), *(second[1].logprobs or [])]
    logits = oracle.logits([*prompt, *text])[len(prompt) - 1 :]
    assert [entry[0] for entry in found] == text
    for row, (token, logprob, rank, top_ids, _) in enumerate(found):
        expected, expected_rank, ids = expected_logprobs(logits[row], token, 3)
        assert logprob == pytest.approx(expected, abs=1e-4)
        assert (rank, top_ids) == (expected_rank, ids)


def test_a_step_split_at_requests_gives_the_same(model: Any, oracle: Oracle) -> None:
    def texts(max_rows: int) -> list[RowResult]:
        runner = make_runner(
            model, TinySetup(num_drafts=2), lambda slot, known: oracle.continuation(known, slot)
        )
        runner.sampling._max_rows = max_rows
        tops = [None, 2, 0, 5]
        news = [start(s, [s + 1, 9, 9], greedy(logprobs=top)) for s, top in enumerate(tops)]
        rows = [ScheduledRow(slot, 3, 0, 0, False, 0) for slot in range(4)]
        run(runner, StepPlan(0, new_requests=news, rows=rows))
        rows = [ScheduledRow(slot, 3, 2, 3, False, 1) for slot in range(4)]
        results = run(runner, StepPlan(1, rows=rows))
        runner.shutdown()
        return results

    whole, pieces = texts(1000), texts(4)
    assert [result.token_ids for result in whole] == [result.token_ids for result in pieces]
    assert [len(result.token_ids) for result in whole] == [1, 2, 3, 3]
    for left, right in zip(whole, pieces, strict=True):
        assert (left.logprobs is None) == (right.logprobs is None)
        for one, other in zip(left.logprobs or [], right.logprobs or [], strict=True):
            assert one[0] == other[0] and one[2:4] == other[2:4]
            assert one[1] == pytest.approx(other[1], abs=1e-5)


def test_a_grammar_sees_the_drafts_and_masks_every_row(model: Any, oracle: Oracle) -> None:
    prompt = [3, 1, 4, 1, 5]
    text = oracle.continuation(prompt, 3)
    runner = make_runner(model, TinySetup(num_drafts=3), lambda slot, known: text[1:])
    rows = [ScheduledRow(0, 5, 0, 0, False, 0)]
    run(runner, StepPlan(0, new_requests=[start(0, prompt, greedy())], rows=rows))
    plan = StepPlan(1, rows=[ScheduledRow(0, 4, 3, 5, False, 1)], needs_draft_ids=True)
    runner.forward(plan)
    drafts = runner.take_draft_token_ids(plan)
    assert drafts == [text[1:]]  # the -1 at the end is not part of the step
    mask = np.full((3, -(-VOCAB // 32)), -1, dtype=np.int32)
    mask.view(np.uint32)[1, text[2] // 32] ^= np.uint32(1 << (text[2] % 32))
    handle = runner.sample(plan, mask)
    mask[:] = 0  # the caller's array is its own again
    result = handle.get()[0]
    runner.shutdown()
    logits = oracle.logits([*prompt, *text[:2]])[-1]
    runner_up = next(token for token in logits.argsort(descending=True) if token != text[2])
    assert result.token_ids == [text[1], int(runner_up)]
    assert result.num_draft_tokens == 2


def test_caps_on_drafts_are_obeyed(model: Any, oracle: Oracle) -> None:
    options: list[dict[str, Any]] = [
        {},
        {"speculative_max_tokens": 1},
        {"speculative_enabled": False},
        {"speculative_max_tokens": 9},
    ]
    runner = make_runner(
        model, TinySetup(num_drafts=3), lambda slot, known: oracle.continuation(known, 3)
    )
    news = [start(slot, [slot + 1, 2], greedy(**option)) for slot, option in enumerate(options)]
    rows = [ScheduledRow(slot, 2, 0, 0, False, 0) for slot in range(4)]
    run(runner, StepPlan(0, new_requests=news, rows=rows))
    assert [(row >= 0).sum() for row in runner.table.draft_tokens] == [3, 1, 0, 3]
    rows = [ScheduledRow(slot, 4, 3, 2, False, 1) for slot in range(4)]
    results = run(runner, StepPlan(1, rows=rows))
    runner.shutdown()
    assert [result.num_draft_tokens for result in results] == [3, 1, 0, 3]
    assert [len(result.token_ids) for result in results] == [4, 2, 1, 4]


@pytest.mark.parametrize("options", [{"frequency_penalty": 1.5}, {"temperature": 1.0}])
def test_preemption_and_drafts_do_not_change_the_text(
    model: Any, oracle: Oracle, options: dict[str, Any]
) -> None:
    """Old output still counts as output after preemption; noise hangs on positions alone."""
    texts = []
    for preempt, num_drafts in ((0.0, 0), (0.15, 0), (0.15, 2)):
        if num_drafts and "temperature" in options:
            continue  # the same law, but not the same draws
        rng = random.Random(8)
        script = (lambda slot, known: oracle.continuation(known, 2)) if num_drafts else None
        runner = make_runner(model, TinySetup(num_drafts=num_drafts, padded=preempt > 0), script)
        maker = PlanMaker(runner, None, rng, num_drafts=num_drafts, preempt=preempt)
        jobs = [maker.add_prompt([seed, 5, 6], 20, seed=seed, **options) for seed in range(5)]
        maker.run()
        runner.shutdown()
        assert (preempt > 0) == any(job.incarnation > 0 for job in jobs)
        texts.append([job.tokens[: job.wanted] for job in jobs])
    assert all(text == texts[0] for text in texts)


def test_an_error_ends_its_step_and_later_ones_can_run(model: Any, oracle: Oracle) -> None:
    runner = make_runner(model, TinySetup())
    bad = StepPlan(0, rows=[ScheduledRow(0, 100, 0, 0, True, 0)])  # more tokens than fit
    with pytest.raises(AssertionError):
        runner.execute(bad).get()
    rows = [ScheduledRow(0, 2, 0, 0, False, 0)]
    good = StepPlan(1, new_requests=[start(0, [1, 2], greedy())], rows=rows)
    assert run(runner, good)[0].token_ids == oracle.continuation([1, 2], 1)
    assert runner.execute(StepPlan(2, freed_slots=[0])).get() == []
    runner.shutdown()


def test_an_error_in_the_drafter_surfaces_at_the_next_step(model: Any) -> None:
    def script(slot: int, known: list[int]) -> list[int]:
        raise ZeroDivisionError("no drafts today")

    runner = make_runner(model, TinySetup(num_drafts=1), script)
    rows = [ScheduledRow(0, 2, 0, 0, False, 0)]
    plan = StepPlan(0, new_requests=[start(0, [1, 2], greedy())], rows=rows)
    assert len(run(runner, plan)[0].token_ids) == 1
    with pytest.raises(ZeroDivisionError):
        runner.execute(StepPlan(1, rows=[ScheduledRow(0, 1, 0, 2, False, 1)])).get()
    runner.shutdown()


def test_nan_is_told_per_row(oracle: Oracle) -> None:
    broken = tiny_llama()
    broken.embed_tokens.weight[7] = torch.nan
    runner = make_runner(broken, TinySetup())
    news = [start(0, [7, 2], greedy()), start(1, [1, 2], greedy())]
    rows = [ScheduledRow(slot, 2, 0, 0, False, 0) for slot in (0, 1)]
    results = run(runner, StepPlan(0, new_requests=news, rows=rows))
    runner.shutdown()
    assert [result.has_nan for result in results] == [True, False]
    assert results[1].token_ids == oracle.continuation([1, 2], 1)


def test_build_model_runner_serves_a_folder_with_random_weights(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "eos_token_id": 2,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    seen: list[Progress] = []
    runner = build_model_runner(
        Config(
            model=ModelConfig(
                str(tmp_path), load_format="dummy", device="cpu", max_model_len=MAX_LEN
            ),
            cache=CacheConfig(block_size=8, kv_cache_memory_bytes=1 << 20),
            scheduler=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32),
        ),
        seen.append,
    )
    facts = runner.facts
    assert (facts.max_model_len, facts.vocab_size, facts.device) == (MAX_LEN, VOCAB, "cpu")
    assert facts.eos_token_ids == (2,) and facts.attention_backend == "reference"
    group = facts.kv_groups[0]
    # 4 requests of 64 tokens need no more than 32 blocks and the null block.
    assert (group.block_size, group.num_blocks, group.sliding_window) == (8, 33, None)
    assert {"load", "kv_cache", "warm_up", "capture"} <= set(facts.startup_seconds)
    assert {"load", "kv_cache"} <= {progress.phase for progress in seen}
    plan = StepPlan(0, new_requests=[start(0, [1, 2, 3], greedy())])
    plan.rows = [ScheduledRow(0, 3, 0, 0, False, 0)]
    assert len(run(runner, plan)[0].token_ids) == 1
    runner.shutdown()


def test_a_cache_too_small_for_one_request_is_refused_before_weights_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = {"model_type": "llama", "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 256}
    (tmp_path / "config.json").write_text(json.dumps(config | heads))
    monkeypatch.setattr(
        "slipstream.runner.startup.load_target.load_weights", None
    )  # would raise TypeError
    with pytest.raises(NoKVMemory, match="raise --kv-cache-memory-bytes or lower --max-model-len"):
        build_model_runner(
            Config(
                model=ModelConfig(str(tmp_path), device="cpu"),
                cache=CacheConfig(kv_cache_memory_bytes=100_000),
            ),
            lambda progress: None,
        )
