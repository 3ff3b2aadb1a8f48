"""Harmony streams split into the same reasoning, calls and text in every chunking of their tokens.

The streams are written by hand after OpenAI's description of the format and replies of gpt-oss.
"""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

from slipstream.server.output.chat_output import OutputParser
from slipstream.server.tool_parsers import detect_tool_parser, tool_parser_class
from slipstream.server.tool_parsers.base import (
    ContentDelta,
    ParsedOutput,
    ReasoningDelta,
    ToolCallStart,
)
from slipstream.server.tool_parsers.harmony import HarmonyToolParser

TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {}}}
    for name in ("weather", "now")
]
PROMPT = "<|start|>system<|message|>…<|end|><|start|>user<|message|>Hi<|end|><|start|>assistant"
THINK = "<|channel|>analysis<|message|>Rome? I must look.<|end|>"
NEXT = "<|start|>assistant"
ARGS = '{"city": "Rome", "unit": "C"}'
Call = tuple[str, str]
# what the case shows, text, reasoning, content, calls
CASES: list[tuple[str, str, str, str, list[Call]]] = [
    ("answer", f"{THINK}{NEXT}<|channel|>final<|message|>Four.\n<|return|>",
     "Rome? I must look.", "Four.\n", []),
    ("stop token cut off", f"{THINK}{NEXT}<|channel|>final<|message|>Four < 5",
     "Rome? I must look.", "Four < 5", []),
    ("no reasoning", "<|channel|>final<|message|> Four.", "", " Four.", []),
    ("only reasoning", "<|channel|>analysis<|message|>endless", "endless", "", []),
    ("call, recipient in the channel",
     f"{THINK}{NEXT}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ARGS}"
     "<|call|>", "Rome? I must look.", "", [("weather", ARGS)]),
    ("call, recipient in the role",
     f"{THINK}{NEXT} to=functions.weather<|channel|>commentary json<|message|>{ARGS}",
     "Rome? I must look.", "", [("weather", ARGS)]),
    ("call at once", " to=functions.now<|channel|>commentary <|constrain|>json<|message|>"
     "<|call|>", "", "", [("now", "{}")]),
    ("call from the analysis", "<|channel|>analysis to=functions.now code<|message|>{}<|call|>",
     "", "", [("now", "{}")]),
    ("name without its prefix", f"<|channel|>commentary to=weather<|message|>{ARGS}<|call|>",
     "", "", [("weather", ARGS)]),
    ("preamble and two calls",
     f"{THINK}{NEXT}<|channel|>commentary<|message|>I look.<|end|>{NEXT}<|channel|>commentary "
     f"to=functions.weather <|constrain|>json<|message|>{ARGS}<|call|>{NEXT}<|channel|>commentary "
     "to=functions.now<|message|>{}<|call|>",
     "Rome? I must look.", "I look.", [("weather", ARGS), ("now", "{}")]),
    ("two thoughts, two texts",
     f"{THINK}{NEXT}<|channel|>commentary<|message|>Wait.<|end|>{NEXT}<|channel|>analysis<|message|>"
     f"Hm.<|end|>{NEXT}<|channel|>final<|message|>Four.",
     "Rome? I must look.Hm.", "Wait.Four.", []),
    ("two thoughts in a row", f"{THINK}{NEXT}{THINK}{NEXT}<|channel|>final<|message|>a",
     "Rome? I must look.\n\nRome? I must look.", "a", []),
    ("the model's own tool", f"<|channel|>analysis to=python code<|message|>1 + 1<|call|>{NEXT}"
     "<|channel|>final<|message|>2", "1 + 1", "2", []),
    ("missing ends", f"<|channel|>analysis<|message|>So.<|channel|>final<|message|>4{NEXT}"
     "<|channel|>final<|message|>5", "So.", "4\n\n5", []),
    ("an unfinished header", f"{THINK}{NEXT}<|channel|>fin", "Rome? I must look.", "", []),
    ("no harmony", "Four <b> is < 5.", "", "Four <b> is < 5.", []),
    ("no harmony, white space first", "\n{}", "", "\n{}", []),
    ("nothing", "", "", "", []),
]  # fmt: skip


def tokens_of(text: str) -> list[str]:
    """Special tokens whole, and pieces of words of up to three characters."""
    return [t for t in re.split(r"(<\|\w+\|>|\w{1,3}|\W)", text) if t]


def parse(parser: OutputParser, pieces: list[str]) -> ParsedOutput:
    parsed = ParsedOutput()
    for piece in pieces:
        parsed.add(parser.push(piece))
    return parsed.add(parser.finish())


def chunkings(text: str) -> list[list[str]]:
    """Every cut in two, all characters, all tokens, and random steps of one to five tokens."""
    tokens, rng = tokens_of(text), random.Random(0)
    cuts = [[text[:at], text[at:]] for at in range(len(text) + 1)]
    steps = []
    for _ in range(10):
        step, left = [], list(tokens)
        while left:
            count = rng.randint(1, 5)
            step.append("".join(left[:count]))
            left = left[count:]
        steps.append(step)
    return [*cuts, list(text), tokens, *steps]


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), [c[1:] for c in CASES],
                         ids=[c[0] for c in CASES])  # fmt: skip
def test_a_stream_in_every_chunking(
    text: str, reasoning: str, content: str, calls: list[Call]
) -> None:
    for pieces in chunkings(text):
        parsed = parse(OutputParser(None, HarmonyToolParser(TOOLS, prompt=PROMPT)), pieces)
        assert (parsed.reasoning, parsed.content) == (reasoning, content), pieces
        assert [(call.name, call.arguments) for call in parsed.tool_calls] == calls, pieces


def test_text_streams_at_once() -> None:
    parser = HarmonyToolParser(TOOLS, lambda: "c1", PROMPT)
    assert parser.push("<|channel|>analysis<|message|>so") == [ReasoningDelta("so")]
    assert parser.push(" far<|end|><|start|>assistant<|channel|>commentary") == [
        ReasoningDelta(" far")
    ]
    assert parser.push(' to=functions.now<|message|>{"a"')[0] == ToolCallStart(0, "c1", "now")
    parser.push(": 1}<|call|>")
    assert parser.push("<|start|>assistant<|channel|>final<|message|>4") == [ContentDelta("4")]


@pytest.mark.parametrize(
    ("tail", "text", "reasoning", "content"),
    [
        ("<|channel|>final<|message|>", '{"a": 1}<|return|>', "", '{"a": 1}'),
        ("<|channel|>final<|message|>Once", " upon", "", " upon"),
        ("<|channel|>analysis<|message|>Hm", f", so<|end|>{NEXT}<|channel|>final<|message|>4",
         ", so", "4"),
        ("<|channel|>", "analysis<|message|>a<|end|>", "a", ""),
    ],
)  # fmt: skip
def test_the_prompt_says_where_the_output_starts(
    tail: str, text: str, reasoning: str, content: str
) -> None:
    for pieces in chunkings(text):
        parsed = parse(OutputParser(None, HarmonyToolParser(None, prompt=PROMPT + tail)), pieces)
        assert (parsed.reasoning, parsed.content) == (reasoning, content), pieces


def test_without_tools_there_are_no_calls() -> None:
    text = "<|channel|>commentary to=functions.f<|message|>{}<|call|>"
    parsed = parse(OutputParser(None, HarmonyToolParser(None, prompt=PROMPT)), [text])
    assert (parsed.content, parsed.tool_calls) == ("{}", [])


def test_an_answer_alone_needs_a_header_at_the_end_of_the_prompt() -> None:
    assert HarmonyToolParser.answer_header(PROMPT) == "<|channel|>final<|message|>"
    assert HarmonyToolParser.answer_header(f"{PROMPT}<|channel|>final<|message|>Once") == ""


def test_the_template_shows_the_format() -> None:
    template: Any = '{{- "<|start|>assistant<|channel|>analysis<|message|>" + m.thinking }}'
    assert detect_tool_parser(template) == "gpt_oss"
    assert tool_parser_class("openai") is tool_parser_class("gpt_oss") is HarmonyToolParser
