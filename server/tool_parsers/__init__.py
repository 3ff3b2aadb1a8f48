"""Looks up tool-call parsers by name; a format's file is imported on first use."""

from __future__ import annotations

import importlib

from .base import ToolParser

# name -> (file, class)
_PARSERS = {
    "hermes": ("hermes", "HermesToolParser"),
    "qwen": ("hermes", "HermesToolParser"),
    "qwen25": ("hermes", "HermesToolParser"),
    "qwen3": ("hermes", "HermesToolParser"),
    "qwen3_coder": ("qwen3_coder", "Qwen3CoderToolParser"),
    "qwen3_xml": ("qwen3_coder", "Qwen3CoderToolParser"),
    "llama3_json": ("llama3_json", "Llama3JsonToolParser"),
    "llama4_json": ("llama3_json", "Llama3JsonToolParser"),
    "mistral": ("mistral", "MistralToolParser"),
    "deepseek_v3": ("deepseek", "DeepSeekToolParser"),
    "deepseek_v31": ("deepseek", "DeepSeekToolParser"),
    "deepseek_v32": ("deepseek", "DsmlV32ToolParser"),
    "deepseek_v4": ("deepseek", "DsmlToolParser"),
    "gemma": ("gemma", "GemmaToolParser"),
    "gemma3": ("gemma", "GemmaToolParser"),
    "gemma4": ("gemma", "GemmaToolParser"),
    "functiongemma": ("gemma", "GemmaToolParser"),
    "pythonic": ("pythonic", "PythonicToolParser"),
    "llama4_pythonic": ("pythonic", "PythonicToolParser"),
    "gpt_oss": ("harmony", "HarmonyToolParser"),
    "openai": ("harmony", "HarmonyToolParser"),
}
TOOL_PARSERS = tuple(_PARSERS)

# Text in a chat template -> the format that its model was trained on; the first match counts.
_SIGNS = (
    ("<|channel|>analysis", "gpt_oss"),
    ("<parameter=", "qwen3_coder"),
    ("<function=", None),  # another XML format, which no parser here reads
    ("｜DSML｜function_calls", "deepseek_v32"),
    ("｜DSML｜", "deepseek_v4"),
    ("<｜tool▁call▁begin｜>", "deepseek_v3"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call>", "gemma"),
    ("<start_function_call>", "gemma"),
    ("<tool_call>", "hermes"),
    ("<|python_start|>", "pythonic"),
    ("func_name1(", "pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ("ipython", "llama3_json"),
    ("tool_code", "gemma"),
    ("<start_of_turn>", "gemma"),
)


def tool_parser_class(name: str) -> type[ToolParser]:
    """The parser class of a format; raises ValueError for a name that is not in TOOL_PARSERS."""
    if name not in _PARSERS:
        raise ValueError(f"Unknown tool parser {name!r}. Available: {', '.join(_PARSERS)}.")
    file, class_name = _PARSERS[name]
    parser = getattr(importlib.import_module(f".{file}", __package__), class_name)
    assert isinstance(parser, type) and issubclass(parser, ToolParser)
    return parser


def detect_tool_parser(chat_template: str | None, supports_tools: bool = True) -> str | None:
    """The tool-call format that a chat template uses, or None if it uses none that is known.

    For a template that does not show tools it is hermes, the format in which
    `ChatTemplate.render_chat` then describes them.
    """
    if not supports_tools:
        return "hermes"
    return next((name for sign, name in _SIGNS if sign in (chat_template or "")), None)
