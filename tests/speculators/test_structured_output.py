"""Structured output through whole engines: 24 schemas, every drafter, preemption, distributions."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from scipy.stats import chisquare
from transformers import LlamaForCausalLM

from slipstream.configs.speculative import METHODS as KNOWN_METHODS
from slipstream.runner.grammars.pool import GrammarPool
from slipstream.runner.messages import AddRequest, GrammarSpec, SamplingParams

from ..cases import some
from .grammar_cases import (
    CASES,
    EOS,
    METHODS,
    MORE_METHODS,
    TOKENS,
    Answers,
    Models,
    backend,
    check,
    requests,
    run,
    text_of,
    tokens_of,
)

# Room for a part of the requests that run at once.
TIGHT = {
    "scheduler": {"max_num_seqs": 16, "max_num_batched_tokens": 64},
    "cache": {"block_size": 4, "num_gpu_blocks_override": 136},
}


NUM_DRAWS = 600  # answers whose distribution is tested


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"), std=0.25)


@pytest.fixture(scope="module")
def judge() -> Iterator[GrammarPool]:
    judge = backend()
    yield judge
    judge.shutdown()


def prove(models: Models, judge: GrammarPool, method: str, copies: int, every: int = 1) -> Answers:
    """Run all cases, or each one in `every`, with so few KV blocks that requests are preempted."""
    engine = models.engine(method, **TIGHT)
    asked = requests([*range(0, len(CASES), every)] * copies, seed=copies)
    answers = run(engine, asked)
    engine.close()
    check(answers, asked, judge)
    assert len(answers.reasons) == 24 * copies // every
    assert answers.num_preemptions > 0 or copies == 1
    if method != "off":
        assert 0 < answers.accepted < answers.drafted
    return answers


def greedy(answers: Answers) -> dict[str, list[int]]:
    return {n: t for n, t in answers.tokens.items() if int(n.partition(":")[0]) % 3 == 0}


@pytest.mark.parametrize(
    "methods", [("draft_model",), pytest.param(METHODS[1:], marks=pytest.mark.slow)]
)
def test_trap_14_24_schemas_with_drafters_are_valid_and_greedy_answers_do_not_depend_on_them(
    models: Models, judge: GrammarPool, methods: tuple[str, ...]
) -> None:
    found = {method: greedy(prove(models, judge, method, 2)) for method in ("off", *methods)}
    assert all(answers == found["off"] for answers in found.values())
    assert len(found["off"]) == 16


@pytest.mark.parametrize(
    ("method", "every"),
    some([(method, every) for method in MORE_METHODS for every in (1, 3)], [("mtp", 3)]),
)
def test_24_schemas_are_valid_with_the_drafters_of_other_targets(
    models: Models, judge: GrammarPool, method: str, every: int
) -> None:
    prove(models, judge, method, 1, every)


def test_every_method_is_proven() -> None:
    assert {*METHODS, *MORE_METHODS} == set(KNOWN_METHODS)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS + MORE_METHODS)
def test_trap_14_24_schemas_times_16_are_valid(
    models: Models, judge: GrammarPool, method: str
) -> None:
    prove(models, judge, method, 16)


def law(models: Models, prompt: list[int], texts: list[str]) -> list[float]:
    """Probabilities of the texts, all two tokens of a, b and c, by transformers."""
    model = LlamaForCausalLM.from_pretrained(models.target).eval()
    allowed = torch.tensor([TOKENS.index(letter.encode()) for letter in "abc"])

    def after(ids: list[int]) -> dict[int, float]:
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1].double()
        return dict(zip(allowed.tolist(), logits[allowed].softmax(0).tolist(), strict=True))

    first = after(prompt)
    second = {token: after([*prompt, token]) for token in first}
    return [first[a] * second[a][b] for a, b in (tokens_of(text.encode()) for text in texts)]


@pytest.mark.parametrize("method", some(("draft_model", "eagle3", "ngram"), ("draft_model",)))
def test_the_law_of_masked_tokens_is_the_targets(models: Models, method: str) -> None:
    """A grammar allows two of three tokens: the distribution must not depend on the drafts."""
    # "b", the draft after "a" and after "c" that a lookup finds, is sometimes right.
    prompt = tokens_of(b"ab cb ab cb ")
    texts = ["".join(pair) for pair in itertools.product("abc", repeat=2)]
    engine = models.engine(method, scheduler={"max_num_seqs": 64, "max_num_batched_tokens": 2048})
    grammar = GrammarSpec("regex", "[abc]{2}")
    asked = [
        AddRequest(
            str(seed),
            prompt,
            SamplingParams(seed=seed, max_tokens=9, stop_token_ids=[EOS], grammar=grammar),
        )
        for seed in range(NUM_DRAWS)
    ]
    answers = Answers()
    engine.engine.handle(list(asked))
    while engine.engine.has_work():
        for step in engine.engine.step():
            answers.take(step)
    engine.close()
    counts = Counter(text_of(tokens[:-1]).decode() for tokens in answers.tokens.values())
    assert set(counts) <= set(texts)
    expected = [NUM_DRAWS * p for p in law(models, prompt, texts)]
    assert sum(expected) == pytest.approx(NUM_DRAWS)
    assert chisquare([counts[text] for text in texts], expected).pvalue > 1e-4


def test_min_tokens_yields_to_a_grammar_that_is_over(models: Models) -> None:
    engine = models.engine("ngram")
    grammar = GrammarSpec("regex", "[ab]{2,4}")
    sampling = {"max_tokens": 40, "stop_token_ids": [EOS], "temperature": 1.0, "grammar": grammar}
    for min_tokens, shortest in ((0, 2), (4, 4), (30, 4)):
        answers = engine.run([[1, 2, 3]] * 8, min_tokens=min_tokens, **sampling)
        texts = [text_of(tokens[:-1]) for tokens in answers.tokens.values()]
        assert min(map(len, texts)) >= shortest and max(map(len, texts)) <= 4
        assert all(set(text) <= set(b"ab") for text in texts)
    engine.close()


def test_max_tokens_cuts_an_answer_short_and_says_so(models: Models) -> None:
    engine = models.engine("draft_model")
    asked = [
        AddRequest(
            "0:0", [5], SamplingParams(seed=1, max_tokens=3, grammar=GrammarSpec("regex", "a{9}"))
        )
    ]
    answers = run(engine, asked)
    assert (answers.reasons["0:0"], text_of(answers.tokens["0:0"])) == ("length", b"aaa")
    engine.close()


def test_a_dead_end_of_grammar_and_other_options_ends_its_request_alone(models: Models) -> None:
    engine = models.engine("off")
    grammar = GrammarSpec("regex", "[ab]{5}")
    rest = {"max_tokens": 9, "stop_token_ids": [EOS], "grammar": grammar}
    engine.engine.handle(
        [
            AddRequest("dead", [1], SamplingParams(seed=1, allowed_token_ids=[3], **rest)),  # type: ignore[arg-type]
            AddRequest("fine", [1], SamplingParams(seed=1, **rest)),  # type: ignore[arg-type]
        ]
    )
    last = {}
    while engine.engine.has_work():
        for step in engine.engine.step():
            last |= {output.request_id: output for output in step.outputs}
    engine.close()
    assert last["fine"].finish_reason == "stop"
    assert last["dead"].finish_reason == "error" and "grammar" in (last["dead"].error or "")
