"""Finds out why few drafts are accepted: reads the head's files and asks the engine again.

The engine that is checked answers long prompts, and texts without the chat template. Other
auxiliary layers need an engine of their own for each choice, which the caller starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....runner.messages import SamplingParams
from ...drafters.acceptance import Submits, Tally
from ..drafts import tally
from ..plan import Subject
from ..replies import Reply, generate
from ..report import Report, percent
from . import causes
from .causes import HeadFiles

GROUP = "Diagnosis"
MAX_TOKENS = 32  # of a reply of an experiment
_MOST_PROMPTS = 16
_LONG = 2048  # tokens of a long prompt at most
_MOST_LONG = 4

Measure = Callable[[tuple[int, ...]], Awaitable[Tally]]  # boundaries -> greedy acceptance


@dataclass(frozen=True)
class Patient:
    """The drafter whose acceptance is explained."""

    method: str
    head: HeadFiles | None = None  # None: a model of its own, or files that are not local
    target: Mapping[str, Any] = field(default_factory=dict)  # the model's config, if it is known
    boundaries: tuple[int, ...] = ()  # that the user set
    weight_formats: str = ""  # of the model's quantised weights
    max_model_len: int = 0


async def accepted(engine: Submits, prompts: Sequence[Sequence[int]]) -> Tally:
    """The acceptance of greedy replies to these prompts."""
    sampling = SamplingParams(0, MAX_TOKENS, temperature=0.0)
    return tally(await generate(engine, prompts, sampling, drafts=True))


async def diagnose(
    engine: Submits, subject: Subject, patient: Patient, replies: Sequence[Reply], report: Report
) -> bool:
    """Add what explains a low acceptance of `replies`; returns whether it is low.

    It looks for everything but other auxiliary layers (see `try_boundaries`).
    """
    now = tally(replies)
    first = causes.first_acceptance(now)
    if patient.method == "ngram" or not now.drafted:
        return False
    if first >= causes.LOW:
        text = f"{percent(first)} of the first drafts are accepted; causes are sought below "
        text += percent(causes.LOW)
        report.note(GROUP, "acceptance", text)
        return False
    found: list[str] = []
    if patient.head is not None:
        emitted = Counter(token for reply in replies for token in reply.token_ids)
        found += causes.weights(patient.head)
        found += causes.vocabulary(patient.head, subject.vocab_size, emitted)
        found += causes.config(patient.head, patient.target)
    found += causes.precision(patient.weight_formats)
    plain = list(subject.plain_prompts[:_MOST_PROMPTS])
    if plain:
        chats = await accepted(engine, subject.prompts[:_MOST_PROMPTS])
        found += causes.template(chats, await accepted(engine, plain))
    long = long_prompts(subject.prompts, patient.max_model_len)
    if long:
        at_length = await accepted(engine, long)
        found += causes.context(now, at_length, len(long[0]), patient.head)
    add(found, report)
    if not found:
        text = f"{percent(first)} of the first drafts are accepted, and no cause was found"
        report.note(GROUP, "acceptance", text)
    return True


def add(found: Sequence[str], report: Report) -> None:
    """Add diagnoses, which begin with their cause and a colon."""
    for sentence in found:
        cause, _, text = sentence.partition(": ")
        report.note(GROUP, cause, text)


def long_prompts(prompts: Sequence[Sequence[int]], max_model_len: int) -> list[list[int]]:
    """A few prompts that fill the context, made of shorter ones; none if it is too small."""
    length = min(_LONG, max_model_len - MAX_TOKENS - 1)
    usual = sorted(map(len, prompts))[len(prompts) // 2] if prompts else 0
    if not usual or length < 4 * usual:
        return []
    found = []
    for start in range(min(_MOST_LONG, len(prompts))):
        text: list[int] = []
        place = start
        while len(text) < length:
            text = [*prompts[place % len(prompts)], *text]
            place += 1
        found.append(text[-length:])
    return found


def present_boundaries(patient: Patient) -> tuple[int, ...]:
    """The auxiliary hidden states that the head reads now; empty if they cannot be told.

    The rule is that of docs/speculation.md: an id names a layer's input, unless the first is 1.
    """
    if patient.boundaries:
        return patient.boundaries
    layers = patient.target.get("num_hidden_layers")
    if patient.head is None or not isinstance(layers, int):
        return ()
    config, key = patient.head.config, "eagle_aux_hidden_state_layer_ids"
    at_top, below = config.get(key), (config.get("eagle_config") or {}).get(key)
    ids = at_top or below
    if not ids:
        return (2, layers // 2, layers - 3)
    has_both = [i - 1 for i in at_top or ()] == list(below or ())
    is_output = "transformer_layer_config" not in config and not has_both and ids[0] == 1
    return tuple(i + is_output for i in ids)


async def try_boundaries(patient: Patient, now: Tally, measure: Measure, report: Report) -> None:
    """Measure other auxiliary layers, each in an engine of its own, and name better ones."""
    present, layers = present_boundaries(patient), patient.target.get("num_hidden_layers")
    if patient.method != "eagle3" or not present or not isinstance(layers, int):
        return
    measured = {present: now}
    for other in causes.other_boundaries(present, layers):
        measured[other] = await measure(other)
    found = causes.boundaries(present, measured)
    add(found, report)
    if not found:
        best = max(causes.first_acceptance(found_tally) for found_tally in measured.values())
        text = f"{len(measured) - 1} other choices were tried, of which none accepts more than "
        report.note(GROUP, "auxiliary layers", f"{text}{percent(best)} of the first drafts")
