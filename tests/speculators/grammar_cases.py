"""24 schemas with checks of their values, a small vocabulary, and engines that use it."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from datetime import date
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from slipstream.configs.schema import SpeculativeConfig
from slipstream.runner.grammars.pool import GrammarPool, build_grammar_backend
from slipstream.runner.messages import AddRequest, GrammarSpec, SamplingParams, SetVocabulary
from slipstream.server.json_schema import prepare_schema

from .eagle_oracle import head_weights, save_head
from .gemma4_oracle import AssistantOracle
from .mtp_oracle import MtpOracle
from .tiny_engine import Run, TinyEngine, save_llama

EOS, VOCAB, MAX_LEN = 0, 144, 512
# Printable ASCII, line feed, two halves of a character, longer pieces; the other ids spell nothing.
TOKENS = [
    *[b"", *(bytes([byte]) for byte in range(32, 127)), b"\n", b"\xc3", b"\xa9"],
    *(b'{"', b'": ', b'", "', b'"}', b"true", b"false", b"null", b"[]", b"},", b"12", b"00"),
    *(b"abc", b' "', b"e-", b"\\u00", b"name", b"20", b"-0"),
]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Color(Enum):
    RED = "red"
    NONE = 'no"ne'


Word = Annotated[str, Field(max_length=6)]
Small = Annotated[int, Field(ge=0, le=120)]


class Person(Strict):
    name: Word
    age: Small


class Team(Strict):
    lead: Person
    others: Annotated[list[Person], Field(max_length=2)]


class Maybe(Strict):
    a: bool | None = None
    b: Word = "x"
    c: Annotated[list[bool], Field(max_length=1)] = []


class Cat(Strict):
    kind: Literal["cat"]
    lives: Small


class Dog(Strict):
    kind: Literal["dog"]
    name: Word


class Awkward(Strict):
    quoted: bool = Field(alias='a "b" \\ c')
    accented: Color = Field(alias="é")


class Constant(Strict):
    version: Literal[2] = Field(...)
    tags: tuple[Literal["x"], Literal["y", None]]


class Dated(Strict):
    when: date
    id: UUID | None
    share: Annotated[int, Field(gt=0, le=100)] | bool


class Group(Strict):
    pet: Cat | Dog
    color: Color
    ids: Annotated[list[Annotated[int, Field(ge=-50, lt=50)]], Field(min_length=2, max_length=3)]


KINDS: list[Any] = [
    *(bool, None, Literal["red", "green", 'b"lue', 3, True], Color, Small, Word),
    Annotated[int, Field(ge=-1000, le=7)],
    Annotated[str, Field(min_length=2, max_length=5)],
    Annotated[str, Field(pattern=r"^[a-c]{2,4}-[0-9]{2}$")],
    Annotated[list[bool], Field(min_length=1, max_length=3)],
    Annotated[list[Small], Field(max_length=4)],
    Annotated[list[Annotated[list[bool], Field(max_length=2)]], Field(max_length=2)],
    tuple[bool, Literal["a", "b"], Word],
    *(Person, Team, Maybe, Awkward, Constant, Dated, Group, Word | Small | None),
    Annotated[Cat | Dog, Field(discriminator="kind")],
    *(date, UUID),
]


@dataclass(frozen=True)
class Case:
    """A grammar and a check that a text conforms to it."""

    adapter: TypeAdapter[Any]
    spec: GrammarSpec

    @classmethod
    def of(cls, kind: Any) -> Case:
        adapter = TypeAdapter(kind)
        schema = prepare_schema(adapter.json_schema(), strict=True)
        return cls(adapter, GrammarSpec("json_schema", json.dumps(schema)))

    def check(self, text: bytes) -> None:
        """ValidationError unless the text is a value of the kind."""
        self.adapter.validate_json(text, strict=True)


CASES = [Case.of(kind) for kind in KINDS]
METHODS = ("off", "ngram", "draft_model", "eagle3")  # with one target
MORE_METHODS = ("eagle", "mtp", "gemma4_mtp")  # with a target of their own, or slow to draft


def text_of(tokens: list[int]) -> bytes:
    """The text of the tokens."""
    return b"".join(TOKENS[token] for token in tokens)


def tokens_of(text: bytes) -> list[int]:
    """Token ids of a text, longest pieces first."""
    tokens = []
    while text:
        best = max((t for t in TOKENS if t and text.startswith(t)), key=len)
        tokens.append(TOKENS.index(best))
        text = text[len(best) :]
    return tokens


class Models:
    """Checkpoints of a target and of its drafters."""

    def __init__(self, folder: Path, std: float) -> None:
        common = {"vocab_size": VOCAB, "max_len": MAX_LEN}
        self.target = save_llama(folder / "target", layers=4, std=std, **common)  # type: ignore[arg-type]
        self.draft = save_llama(folder / "draft", seed=1, layers=1, std=std, **common)  # type: ignore[arg-type]
        weights = head_weights(eagle3=True, vocab_size=VOCAB)
        more = {"vocab_size": VOCAB, "max_position_embeddings": MAX_LEN}
        taps = {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
        self.head = save_head(folder / "head", weights, True, **more, **taps)
        self._folder, self._more = folder, more
        self._pairs: dict[str, tuple[Path, Path | None]] = {}

    def pair(self, method: str) -> tuple[Path, Path | None]:
        """(target, drafter); the drafter is None if there is none or it is in the target's
        checkpoint."""
        if method not in self._pairs:
            self._pairs[method] = self._make(method)
        return self._pairs[method]

    def _make(self, method: str) -> tuple[Path, Path | None]:
        folder = self._folder / method
        if method == "mtp":
            MtpOracle(folder / "target", **self._more)
            return folder / "target", None
        if method == "gemma4_mtp":
            oracle = AssistantOracle(folder, **self._more)  # type: ignore[arg-type]
            return oracle.target_folder, oracle.folder
        if method == "eagle":
            weights = head_weights(eagle3=False, vocab_size=VOCAB)
            return self.target, save_head(folder, weights, False, **self._more)
        return self.target, {"draft_model": self.draft, "eagle3": self.head}.get(method)

    def engine(self, method: str, **changes: Any) -> TinyEngine:
        """An engine with this drafter, K = 3 and the small vocabulary."""
        target, drafter = self.pair(method)
        speculative = SpeculativeConfig(
            method=method,
            model=None if drafter is None else str(drafter),
            num_speculative_tokens=3,
            prompt_lookup_min=1,
        )
        engine = TinyEngine(target, speculative, **changes)
        engine.engine.handle([SetVocabulary(TOKENS, [EOS])])
        return engine


@dataclass
class Answers(Run):
    """A run with the finish reason of each request."""

    reasons: dict[str, str] = field(default_factory=dict)
    num_preemptions: int = 0


def requests(case_numbers: list[int], seed: int) -> list[AddRequest]:
    """One request per case, in random order, priority and temperature (0 for every third)."""
    rng = random.Random(seed)
    made = []
    for number, index in enumerate(case_numbers):
        prompt = [rng.randrange(1, len(TOKENS)) for _ in range(rng.randrange(1, 30))]
        sampling = SamplingParams(
            seed=seed * 1000 + number,
            max_tokens=450,
            temperature=0.0 if number % 3 == 0 else 1.0,
            stop_token_ids=[EOS],
            grammar=CASES[index].spec,
            # An n-gram drafter finds the shape of an answer here.
            prediction_token_ids=tokens_of(b'{"name": "abc", "age": 12, "kind": "cat", [true]'),
        )
        made.append(AddRequest(f"{number}:{index}", prompt, sampling, rng.randrange(3)))
    rng.shuffle(made)
    return made


def run(engine: TinyEngine, asked: list[AddRequest]) -> Answers:
    """Run the requests, a few more arriving at each step."""
    answers, waiting = Answers(), list(asked)
    while waiting or engine.engine.has_work():
        engine.engine.handle(list(waiting[:4]))
        del waiting[:4]
        for step in engine.engine.step():
            answers.take(step)
            answers.num_preemptions += step.stats.num_preemptions
            for output in step.outputs:
                if output.finish_reason is not None:
                    answers.reasons[output.request_id] = output.finish_reason
    return answers


def backend() -> GrammarPool:
    """A separate grammar compiler, to check the engine's output."""
    return build_grammar_backend(TOKENS, "raw", [EOS], VOCAB)


def check(answers: Answers, asked: list[AddRequest], judge: GrammarPool) -> None:
    """Check that every answer stopped by itself, is valid, and has no token that the grammar
    forbids."""
    for request in asked:
        name = request.request_id
        tokens = answers.tokens[name]
        assert answers.reasons[name] == "stop", (name, text_of(tokens))
        assert tokens[-1] == EOS
        CASES[int(name.partition(":")[2])].check(text_of(tokens[:-1]))
        assert request.sampling.grammar is not None
        matcher = judge.compile(request.sampling.grammar).result(timeout=30)
        assert all(matcher.accept(token) for token in tokens) and matcher.is_terminated
