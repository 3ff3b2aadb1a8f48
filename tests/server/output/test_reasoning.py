"""Reasoning is split off the answer in every chunking, and composes with tool calls."""

from __future__ import annotations

import pytest

from slipstream.configs.schema import REASONING_FORMATS
from slipstream.server.output.chat_output import OutputParser
from slipstream.server.output.reasoning import (
    REASONING_PARSERS,
    ReasoningParser,
    detect_reasoning_parser,
    reasoning_parser_class,
)
from slipstream.server.tool_parsers import tool_parser_class
from slipstream.server.tool_parsers.base import ContentDelta, ParsedOutput, ReasoningDelta

G1, G2 = "<|channel>thought", "<channel|>"
# format, end of the prompt, text, reasoning, content
CASES = [
    ("deepseek_r1", None, "I think.\n</think>\n\nFour.", "I think.", "Four."),
    (
        "deepseek_r1",
        "x<think>\n",
        "<think>\nI  think.\n\nSo.</think>4\n",
        "I  think.\n\nSo.",
        "4\n",
    ),
    ("deepseek_r1", None, "endless </thin", "endless </thin", ""),
    ("deepseek_r1", "x<think>\n\n</think>\n\n", "Four.", "", "Four."),
    ("deepseek_v4", "x<｜Assistant｜><think>", "hm</think>Four.", "hm", "Four."),
    ("deepseek_v4", "x<｜Assistant｜></think>", "Four </think>.", "", "Four </think>."),
    (
        "deepseek_v4",
        "x<think>",
        "a <｜DSML｜b\n\n<｜DSML｜tool_calls>",
        "a <｜DSML｜b",
        "<｜DSML｜tool_calls>",
    ),
    ("qwen3", None, "<think>\nhm <b>\n</think>\n\nFour.\n", "hm <b>", "Four.\n"),
    ("qwen3", None, "\n<think>\n\n</think>\n\n Four.", "", "Four."),
    ("qwen3", None, " Four <think>x</think>.", "", " Four <think>x</think>."),
    ("qwen3", "assistant\n<think>\n", "hm</think>4</think>", "hm", "4</think>"),
    ("qwen3", None, "<thin air", "", "<thin air"),
    ("qwen3", None, "", "", ""),
    ("gemma", None, f"{G1}\nhm{G2}Four.", "hm", "Four."),
    ("gemma", None, f"One {G1}\na\n{G2}\ntwo{G1}\nb{G2}", "ab", "One two"),
    ("gemma", f"model\n{G1}\n", f"hm{G2}4", "hm", "4"),
    ("gemma", f"{G1}\n{G2}", "Four <|channel>", "", "Four <|channel>"),
]


def parse(parser: OutputParser | ReasoningParser, pieces: list[str]) -> ParsedOutput:
    parsed = ParsedOutput()
    for piece in pieces:
        parsed.add(parser.push(piece))
    return parsed.add(parser.finish())


@pytest.mark.parametrize(("name", "prompt", "text", "reasoning", "content"), CASES)
def test_a_format_in_every_chunking(
    name: str, prompt: str | None, text: str, reasoning: str, content: str
) -> None:
    pieces = [list(text), *([text[:at], text[at:]] for at in range(len(text) + 1))]
    for cut in pieces:
        parsed = parse(reasoning_parser_class(name)(prompt), cut)
        assert (parsed.reasoning, parsed.content) == (reasoning, content)


def test_reasoning_and_content_stream_at_once() -> None:
    parser = reasoning_parser_class("qwen3")()
    assert parser.push("<think>") == []
    assert parser.push("so far") == [ReasoningDelta("so far")]
    assert parser.push("</think>\n\n4") == [ContentDelta("4")]
    assert parser.push(" < 5") == [ContentDelta(" < 5")]


def test_tool_calls_are_looked_for_behind_the_reasoning_only() -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    text = f"<think>\nI could {call}\n</think>\n\nI call.\n{call}\n{call}"
    for pieces in ([text], list(text), [text[:40], text[40:]]):
        tools = tool_parser_class("hermes")()
        parsed = parse(OutputParser(reasoning_parser_class("qwen3")(), tools), pieces)
        assert parsed.reasoning == f"I could {call}"
        assert parsed.content == "I call."
        assert [(c.name, c.arguments) for c in parsed.tool_calls] == [("f", '{"a": 1}')] * 2


@pytest.mark.parametrize("block", ["tool_calls", "function_calls"])
@pytest.mark.parametrize("end", ["", "</think>", "</think>\n\nI call."])
def test_deepseek_may_call_without_closing_its_reasoning(block: str, end: str) -> None:
    argument = '<｜DSML｜parameter name="a" string="false">1</｜DSML｜parameter>'
    call = f'<｜DSML｜invoke name="f">\n{argument}\n</｜DSML｜invoke>'
    call = f"<｜DSML｜{block}>\n{call}\n</｜DSML｜{block}>"
    text = f"I could call f.{end}\n\n{call}"
    reasoning = reasoning_parser_class("deepseek_v4")
    for pieces in ([text], list(text), *([text[:at], text[at:]] for at in range(len(text)))):
        tools = tool_parser_class("deepseek_v32" if block == "function_calls" else "deepseek_v4")()
        parsed = parse(OutputParser(reasoning("x<think>"), tools), pieces)
        assert parsed.reasoning == "I could call f."
        assert parsed.content == end.removeprefix("</think>").strip()
        assert [(c.name, c.arguments) for c in parsed.tool_calls] == [("f", '{"a": 1}')]


def test_each_part_may_be_missing() -> None:
    assert OutputParser(None, None).parse("<think>a </think>").content == "<think>a </think>"
    assert OutputParser(None, None).push("") == []
    parsed = OutputParser(reasoning_parser_class("deepseek_r1")(), None).parse("a</think>b")
    assert (parsed.reasoning, parsed.content) == ("a", "b")


def test_the_markers_that_are_single_tokens_are_kept() -> None:
    class Tokens:
        def token_to_id(self, token: str) -> int | None:
            return {"<think>": 7, "<tool_call>": 9}.get(token)

    parser = OutputParser(reasoning_parser_class("qwen3")(), tool_parser_class("hermes")())
    assert parser.kept_ids(Tokens()) == {7, 9}
    assert OutputParser(None, None).kept_ids(Tokens()) == frozenset()


def test_the_format_is_read_off_the_template() -> None:
    assert detect_reasoning_parser("{{ '<think>' }}") == "qwen3"
    assert detect_reasoning_parser("<｜Assistant｜><think>\\n") == "deepseek_r1"
    assert detect_reasoning_parser("<｜Assistant｜><think><｜DSML｜invoke") == "deepseek_v4"
    assert detect_reasoning_parser("<|channel>thought") == "gemma"
    assert detect_reasoning_parser("<|im_start|>") is detect_reasoning_parser(None) is None


def test_names() -> None:
    assert REASONING_PARSERS == REASONING_FORMATS  # which the flag takes
    with pytest.raises(ValueError, match="Unknown reasoning parser 'x'. Available: deepseek_r1"):
        reasoning_parser_class("x")
