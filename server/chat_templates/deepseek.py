"""Writes chats in the form that DeepSeek V3.2 and V4 were trained to read.

DeepSeek publishes these models with a Python program in place of a chat template. A server must not
run the programs of a model's folder, so this file has the format once more. Its literal texts are
the models' own: a character more or less is a text that they have not seen.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

from jinja2 import TemplateError

from .chat_messages import TemplateTraits

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT, REMINDER = "<｜User｜>", "<｜Assistant｜>", "<｜latest_reminder｜>"
THINK, THINK_END = "<think>", "</think>"
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_REMINDER = "latest_reminder"
_ROLES = ("system", "developer", "user", "assistant", "tool")
_ASKING = ("user", "developer")
_SWITCHES = ("thinking", "enable_thinking")
_MAX_PROGRAM = 1 << 20  # characters of the folder's program that are searched

Message = Mapping[str, Any]
Messages = Sequence[Message]


class DeepSeekEncoder:
    """What the formats have in common. It stands in for a compiled template.

    A chat's `chat_template_kwargs` may have `thinking` or `enable_thinking`, `reasoning_effort`
    ("none" is without reasoning) and `drop_thinking`.
    """

    traits: ClassVar[TemplateTraits] = TemplateTraits(
        uses_tools=True,
        loops_over_content=False,
        tests_content_type=False,
        tests_content_none=False,
        knows_developer=True,
    )
    block: ClassVar[str]  # the name of the element around calls
    tools: ClassVar[tuple[str, str]]  # the text before and after the functions' schemas
    thinks: ClassVar[bool]  # whether the model reasons if the request says nothing about it

    @property
    def source(self) -> str:
        """The markers of the format, from which the parsers of the output are chosen."""
        return "".join(self.tools)

    def render(self, values: Mapping[str, Any]) -> str:
        """The prompt of a chat; `values` are what a template would get.

        Raises TemplateError with a sentence for the client."""
        effort = values.get("reasoning_effort")
        if effort is not None and effort not in _EFFORTS:
            raise TemplateError(f"reasoning_effort must be one of {', '.join(_EFFORTS)}")
        for name in (*_SWITCHES, "drop_thinking"):
            if values.get(name) not in (None, True, False):
                raise TemplateError(f"{name} must be true or false")
        thinking = self._thinking(values)
        reminds = self.traits.knows_reminder
        messages = _in_order_of_calls(_with_instructions(values["messages"], reminds))
        head = self._head(values)
        if head and messages[0]["role"] in ("system", "developer"):
            messages[0] = {**messages[0], "head": head}
        elif head:
            messages.insert(0, {"role": "system", "content": "", "head": head})
        opens = values["add_generation_prompt"] is True
        keeps = bool(values.get("tools")) or values.get("drop_thinking") is False
        effort_text = self._effort(effort) if thinking else ""
        return BOS + effort_text + "".join(self._chat(messages, thinking, keeps, opens))

    def _chat(
        self, messages: list[Message], thinking: bool, keeps: bool, opens: bool
    ) -> Iterator[str]:
        """The text of each message. `keeps`: earlier reasoning is shown where the format can;
        `opens`: the text ends where the model's answer begins."""
        raise NotImplementedError

    def _effort(self, effort: str | None) -> str:
        """The text in front of the chat that asks for this effort."""
        return ""

    def _thinking(self, values: Mapping[str, Any]) -> bool:
        effort = values.get("reasoning_effort")
        said = [values[name] for name in _SWITCHES if name in values]
        if effort == "none":
            return False
        return any(said) if said else self.thinks or effort is not None

    def _head(self, values: Mapping[str, Any]) -> str:
        """The text of tools and of the answer's schema that the first message carries."""
        head = ""
        if tools := values.get("tools"):
            before, after = self.tools
            schemas = "\n".join(_json(tool.get("function") or tool) for tool in tools)
            head += f"\n\n{before}{schemas}{after}"
        if (schema := values.get("response_schema")) is not None:
            head += (
                "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to "
                f"reply:\n{_json(schema)}"
            )
        return head

    def _answer(self, message: Message, shows_reasoning: bool) -> str:
        """An assistant's message up to its end, without what precedes its reasoning."""
        reasoning = message.get("reasoning_content") or ""
        text = f"{reasoning}{THINK_END}" if shows_reasoning else ""
        text += str(message["content"])
        if calls := message.get("tool_calls"):
            shown = "\n".join(_call(call.get("function") or call) for call in calls)
            text += f"\n\n<｜DSML｜{self.block}>\n{shown}\n</｜DSML｜{self.block}>"
        return text + EOS


class DeepSeekV32Encoder(DeepSeekEncoder):
    """The format of V3.2: results of tools follow the calls; only the newest turn has reasoning."""

    block = "function_calls"
    thinks = False
    tools = (
        "## Tools\n\n"
        "You have access to a set of tools you can use to answer the user's question.\n"
        'You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following '
        "as part of your reply to the user:\n"
        "<｜DSML｜function_calls>\n"
        '<｜DSML｜invoke name="$FUNCTION_NAME">\n'
        '<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE'
        "</｜DSML｜parameter>\n"
        "...\n"
        "</｜DSML｜invoke>\n"
        '<｜DSML｜invoke name="$FUNCTION_NAME2">\n'
        "...\n"
        "</｜DSML｜invoke>\n"
        "</｜DSML｜function_calls>\n\n"
        "String and scalar parameters should be specified as is without any escaping or quotes, "
        'while lists and objects should use JSON format. The "string" attribute should be set to '
        '"true" for string type parameters and "false" for other types (numbers, booleans, arrays, '
        "objects).\n\n"
        "If the thinking_mode is enabled, then after function results you should strongly consider "
        "outputting a thinking block. Here is an example:\n\n"
        "<｜DSML｜function_calls>\n"
        "...\n"
        "</｜DSML｜function_calls>\n\n"
        "<function_results>\n"
        "...\n"
        "</function_results>\n\n"
        "<think>...thinking about results</think>\n\n"
        "Here are the functions available in JSONSchema format:\n"
        "<functions>\n",
        "\n</functions>\n",
    )

    def _chat(
        self, messages: list[Message], thinking: bool, keeps: bool, opens: bool
    ) -> Iterator[str]:
        last = _last(messages, ("user", "developer"))
        end = len(messages) - 1
        for index, message in enumerate(messages):
            role, content, head = message["role"], message["content"], message.get("head", "")
            marker = THINK if thinking and index >= last else THINK_END
            begins = index < end or opens  # an answer
            if role == "system":
                yield content + head
            elif role == "assistant":
                yield self._answer(message, thinking and index > last)
            elif role == "tool":
                if index == 0 or messages[index - 1]["role"] != "tool":
                    yield "\n\n<function_results>"
                yield f"\n<result>{content}</result>"
                if index == end or messages[index + 1]["role"] != "tool":
                    yield "\n</function_results>" + (f"\n\n{marker}" if begins else "")
            else:
                shown = f"{head}\n\n# The user's message is: {content}"
                yield USER + (content if role == "user" else shown)
                yield ASSISTANT + marker if begins else ""
        if opens and messages[end]["role"] in ("system", "assistant"):
            yield ASSISTANT + (THINK if thinking else THINK_END)


_MOST_EFFORT = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to "
    "resolve the root cause, rigorously stress-testing your logic against all potential paths, "
    "edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, "
    "considered alternative, and rejected hypothesis to ensure absolutely no assumption is left "
    "unchecked.\n\n"
)
_BEYOND_IT = "Reasoning Effort: Beyond maximum"
_EVEN_MORE_EFFORT = (
    f"{_BEYOND_IT} — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: "
    "exhaustively decompose the problem into its most fundamental components, trace every causal "
    "chain to its root, and resolve the underlying cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles "
    "and are certain that no assumption remains unchecked and no error remains undiscovered.\n\n"
)


class DeepSeekV4Encoder(DeepSeekEncoder):
    """The format of V4: results of tools are part of the user's turn. With tools, all earlier
    reasoning stays in the chat.

    The first V4 models know one level of effort beyond the usual one, later ones two
    (`has_two_levels`): what the first know as "max" is "high" there.

    A message of role "latest_reminder" has news for the model, such as the date. Usually it stands
    before the user's newest message; behind that one it is the beginning of the answer.
    """

    traits = replace(DeepSeekEncoder.traits, knows_reminder=True)
    block = "tool_calls"
    thinks = True
    tools = (
        "## Tools\n\n"
        "You have access to a set of tools to help answer the user's question. You can invoke "
        'tools by writing a "<｜DSML｜tool_calls>" block like the following:\n\n'
        "<｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="$TOOL_NAME">\n'
        '<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE'
        "</｜DSML｜parameter>\n"
        "...\n"
        "</｜DSML｜invoke>\n"
        '<｜DSML｜invoke name="$TOOL_NAME2">\n'
        "...\n"
        "</｜DSML｜invoke>\n"
        "</｜DSML｜tool_calls>\n\n"
        'String parameters should be specified as is and set `string="true"`. For all other types '
        "(numbers, booleans, arrays, objects), pass the value in JSON format and set "
        '`string="false"`.\n\n'
        "If thinking_mode is enabled (triggered by <think>), you MUST output your complete "
        "reasoning inside <think>...</think> BEFORE any tool calls or final response.\n\n"
        "Otherwise, output directly after </think> with tool calls or final response.\n\n"
        "### Available Tool Schemas\n\n",
        "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke "
        "tool calls.\n",
    )

    def __init__(self, has_two_levels: bool = False) -> None:
        self._efforts = (
            {**dict.fromkeys(("medium", "high", "xhigh"), _MOST_EFFORT), "max": _EVEN_MORE_EFFORT}
            if has_two_levels
            else dict.fromkeys(("xhigh", "max"), _MOST_EFFORT)
        )

    def _effort(self, effort: str | None) -> str:
        return self._efforts.get(effort or "", "")

    def _chat(
        self, messages: list[Message], thinking: bool, keeps: bool, opens: bool
    ) -> Iterator[str]:
        turns = _merged_turns(messages)
        last = _last(turns, ("user", "developer"))
        end = len(turns) - 1
        for index, turn in enumerate(turns):
            role, content, head = turn["role"], turn["content"], turn.get("head", "")
            if role == "system":
                yield content + head
            elif role == "assistant":
                yield self._answer(turn, thinking and (keeps or index > last))
            else:
                yield (REMINDER if role == _REMINDER else USER) + content + head
            follows = (
                opens if index == end else turns[index + 1]["role"] in ("assistant", _REMINDER)
            )
            if follows and (role in _ASKING or (index == end and not _is_answered(turns))):
                yield ASSISTANT + (THINK if thinking and (keeps or index >= last) else THINK_END)


def find_encoder(config: Mapping[str, Any], folder: Path | None) -> DeepSeekEncoder | None:
    """The encoder of a model whose maker publishes none as a template, by its config.json.

    The program in the model's `folder` is only searched for a text that its later form has; it is
    never run."""
    named = config.get("architectures")
    names = {str(name) for name in named} if isinstance(named, list) else set()
    names.add(str(config.get("model_type")))
    if names & {"deepseek_v32", "DeepseekV32ForCausalLM"}:
        return DeepSeekV32Encoder()
    if names & {"deepseek_v4", "DeepseekV4ForCausalLM"}:
        return DeepSeekV4Encoder(_BEYOND_IT in _program(folder))
    return None


def _program(folder: Path | None) -> str:
    path = folder / "encoding" / "encoding_dsv4.py" if folder else None
    if path is None or not path.is_file():
        return ""
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.read(_MAX_PROGRAM)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _call(function: Message) -> str:
    """One call as an element; arguments that are not an object become one parameter.

    Raises TemplateError for a call without a name."""
    if not isinstance(function.get("name"), str):
        raise TemplateError("a tool call must name its function")
    given = function["arguments"]
    given = given if isinstance(given, Mapping) else {"arguments": given}
    parameters = "\n".join(_parameter(name, value) for name, value in given.items())
    return f'<｜DSML｜invoke name="{function["name"]}">\n{parameters}\n</｜DSML｜invoke>'


def _parameter(name: str, value: Any) -> str:
    is_text = isinstance(value, str)
    shown = value if is_text else _json(value)
    string = "true" if is_text else "false"
    return f'<｜DSML｜parameter name="{name}" string="{string}">{shown}</｜DSML｜parameter>'


def _is_answered(turns: Messages) -> bool:
    """Whether the chat ends with reminders, in front of which the model's answer has begun."""
    roles = [turn["role"] for turn in turns]
    while len(roles) > 1 and roles[-1] == _REMINDER:
        roles.pop()
    return len(roles) < len(turns) and roles[-1] in _ASKING


def _with_instructions(messages: Messages, reminds: bool) -> list[Message]:
    """The messages, with roles as DeepSeek knows them. Raises TemplateError for other roles.

    A developer's message in front of a user's is what OpenAI calls so: instructions, thus a system
    message. Others are DeepSeek's, which take the place of a user's.
    """
    found: list[Message] = []
    before_user = False
    for given in reversed(messages):
        message = {key: value for key, value in given.items() if key != "head"}  # it is ours
        role = message.get("role")
        known = role in _ROLES or (reminds and role == _REMINDER)
        if not known:
            raise TemplateError(f"the model knows no messages of role {role!r}")
        if role not in ("developer", "system", _REMINDER):
            before_user = role == "user"
        is_instruction = role == "developer" and before_user
        found.append({**message, "role": "system"} if is_instruction else message)
    return found[::-1]


def _in_order_of_calls(messages: Messages) -> list[Message]:
    """The messages, with the results of one answer's calls in the order of the calls."""
    order: dict[Any, int] = {}
    found: list[Message] = []
    for is_input, group in groupby(messages, lambda message: message["role"] in ("user", "tool")):
        run = list(group)
        if is_input:
            given = (message for message in run if message["role"] == "tool")
            results = iter(sorted(given, key=lambda each: order.get(each.get("tool_call_id"), 0)))
            run = [next(results) if each["role"] == "tool" else each for each in run]
        for message in run:
            if calls := message.get("tool_calls"):
                order = {call.get("id"): index for index, call in enumerate(calls)}
        found += run
    return found


def _merged_turns(messages: Messages) -> list[Message]:
    """The messages, with each run of users' and tools' messages as one user's message."""
    turns: list[Message] = []
    for is_input, group in groupby(messages, lambda message: message["role"] in ("user", "tool")):
        if is_input:
            blocks = [
                each["content"]
                if each["role"] == "user"
                else f"<tool_result>{each['content']}</tool_result>"
                for each in group
            ]
            turns.append({"role": "user", "content": "\n\n".join(blocks)})
        else:
            turns += group
    return turns


def _last(messages: Messages, roles: Sequence[str]) -> int:
    return max((i for i, message in enumerate(messages) if message["role"] in roles), default=-1)
