"""Parses DeepSeek's calls: between special tokens in V3 and R1 (fenced JSON) and V3.1 (bare JSON),
and in the markup DSML of V3.2 and V4, which also has grammars."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from ...runner.messages import GrammarSpec
from ..json_schema import Budget, SchemaError
from ..json_text import json_text, read_json
from .base import ToolParser, Wait
from .forced import grammar_text, parameters_of
from .json_call import JsonToolParser

CALLS, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, SEPARATOR, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"

DSML = "｜DSML｜"
# The elements around calls, in V4, in V3.2, and as V4 writes it now and then.
_BLOCKS = ("tool_calls", "function_calls", "toolcalls")
BLOCKS = tuple(f"<{DSML}{name}>" for name in _BLOCKS)
BLOCK_ENDS = tuple(f"</{DSML}{name}>" for name in _BLOCKS)
INVOKE, INVOKE_END = f'<{DSML}invoke name="', f"</{DSML}invoke>"
PARAMETER, PARAMETER_END = f'<{DSML}parameter name="', f"</{DSML}parameter>"
THINK, THINK_END = "<think>", "</think>"
_VALUE_ENDS = (PARAMETER_END, PARAMETER, INVOKE_END)
_MAX_WHITESPACE = 12  # between the parts of a call: a model cannot write it endlessly


class DeepSeekToolParser(JsonToolParser):
    """Parses blocks of calls; a call is a header, a separator and JSON arguments."""

    special_tokens = (CALLS, CALLS_END, CALL, SEPARATOR, CALL_END)

    def run(self) -> Wait[None]:
        while marker := (yield from self.take_until([CALLS, CALL], self.content)):
            raw = marker
            if marker == CALLS:
                raw += yield from self.take_space()
                raw += yield from self.take_any([CALL])
            yield from self._calls(raw)

    def _calls(self, raw: str) -> Wait[None]:
        """Parse the calls of a block; `raw` is the text so far, up to the first call's marker."""
        while raw.endswith(CALL):
            header: list[str] = []
            separator = yield from self.take_until([SEPARATOR, CALL_END], header.append)
            raw += "".join(header) + separator
            if separator != SEPARATOR:
                break
            body, name = yield from self._name("".join(header).strip())
            raw += body
            if not name or (yield from self.peek()) != "{":
                break
            self.start_call(name)
            whole = yield from self.json_object(self.arguments, [CALL_END])
            if whole:
                yield from self.take_end("```")
            yield from self.take_end(CALL_END)
            space = yield from self.take_space()
            if (yield from self.take_any([CALLS_END])):
                return
            raw = space + (yield from self.take_any([CALL]))
        self.content(raw)

    def _name(self, header: str) -> Wait[tuple[str, str]]:
        """Read what precedes the arguments; returns that text and the function's name."""
        if header != "function":
            return (yield from self.take_space()), header
        line: list[str] = []
        raw = yield from self.take_until(["\n"], line.append)
        name = "".join(line)
        raw = name + raw + (yield from self.take_space())
        raw += yield from self.take_any(["```json"])
        return raw + (yield from self.take_space()), name.strip()


class DsmlToolParser(ToolParser):
    """Parses blocks of `invoke` elements with `parameter` elements; string arguments stream.

    The model says of each parameter whether it is a string; other values are JSON. A value ends
    where the call or the next parameter does, even if its own end is missing, except in calls that
    a grammar constrains: of strict functions, and all if `is_forced`.
    """

    block: ClassVar[str] = "tool_calls"  # the name of the element around calls
    special_tokens = (DSML,)
    # What a grammar must be able to spell, even if these are special tokens.
    grammar_tokens: ClassVar[tuple[str, ...]] = (DSML, THINK_END)

    def __init__(
        self,
        tools: Sequence[Mapping[str, Any]] | None = None,
        new_id: Callable[[], str] | None = None,
        prompt: str = "",
        is_forced: bool = False,
    ) -> None:
        functions = [tool.get("function") or tool for tool in tools or ()]
        self._exact = {f["name"] for f in functions if is_forced or f.get("strict") is True}
        self._is_exact = False  # whether a grammar constrains the present call
        super().__init__(tools, new_id, prompt)

    @classmethod
    def answer_header(cls, prompt: str) -> str:
        return THINK_END if prompt.endswith(THINK) else ""

    @classmethod
    def forced_grammar(
        cls,
        tools: Sequence[Mapping[str, Any]],
        name: str | None = None,
        parallel: bool = True,
        budget: Budget | None = None,
    ) -> GrammarSpec:
        """The grammar of a reply that consists only of calls: with `name`, of one call of it.

        Raises SchemaError as `forced.forced_grammar` does."""
        functions = [tool.get("function") or tool for tool in tools]
        calls = [_call_tag(f, budget) for f in functions if name in (None, f["name"])]
        begin = {"type": "const_string", "value": f"\n\n<{DSML}{cls.block}>\n"}
        end = {"type": "const_string", "value": f"</{DSML}{cls.block}>"}
        form = {
            "type": "sequence",
            "elements": [begin, _calls(calls, parallel and name is None), end],
        }
        return _spec(form)

    @classmethod
    def strict_grammar(
        cls, tools: Sequence[Mapping[str, Any]], budget: Budget | None = None
    ) -> GrammarSpec | None:
        """The grammar of free text with calls, whose arguments fit the parameters of functions that
        are `strict`; None if none is. Raises SchemaError if they cannot be enforced."""
        functions = [tool.get("function") or tool for tool in tools]
        if not any(function.get("strict") is True for function in functions):
            return None
        # The parser reads calls anywhere, so what the grammar leaves free must not begin one.
        free = {"type": "any_text", "excludes": [INVOKE]}
        calls = [
            _call_tag(f, budget) if f.get("strict") is True else _tag(f, free) for f in functions
        ]
        begin = f"<{DSML}{cls.block}>"
        others = [INVOKE, *(block for block in BLOCKS if block != begin)]
        tag = {
            "type": "tag",
            "begin": f"{begin}\n",
            "content": _calls(calls, True),
            "end": f"</{DSML}{cls.block}>",
        }
        return _spec(
            {"type": "triggered_tags", "triggers": [begin], "tags": [tag], "excludes": others}
        )

    def run(self) -> Wait[None]:
        while raw := (yield from self.take_until([*BLOCKS, INVOKE], self.content)):
            if raw in BLOCKS:
                raw += yield from self.take_space()
                raw += yield from self.take_any([INVOKE])
            while raw.endswith(INVOKE):
                name, closed = yield from self.take_through(lambda char: char in '"\n')
                bracket = (yield from self.take_any([">"])) if closed else ""
                raw += name + bracket
                if not bracket or len(name) < 2 or name[-1] != '"':
                    break
                self.start_call(name[:-1])
                self._is_exact = name[:-1] in self._exact
                yield from self._arguments()
                raw = yield from self.take_space()
                if (yield from self.take_any(BLOCK_ENDS)):
                    raw = ""
                    break
                raw += yield from self.take_any([INVOKE])
            self.content(raw)

    def _arguments(self) -> Wait[None]:
        """Read the parameters up to the call's end, or to text that is not a parameter."""
        lead = "{"
        space = yield from self.take_space()
        marker = yield from self.take_any([PARAMETER, INVOKE_END])
        while marker == PARAMETER:
            key, _ = yield from self.take_through(lambda char: char == '"')
            about, closed = yield from self.take_through(lambda char: char == ">")
            if not closed:
                self.arguments(lead)
                return
            self.arguments(f"{lead}{json.dumps(key[:-1], ensure_ascii=False)}: ")
            lead = ", "
            marker = yield from self._value('string="false"' not in about)
            if not marker:
                return  # the text ends inside the value
            if marker == PARAMETER_END:
                space = yield from self.take_space()
                marker = yield from self.take_any([PARAMETER, INVOKE_END])
        if not marker and self._is_exact:  # the call is cut, so that parameters may be missing
            self.arguments("{" if lead == "{" else "")
            yield from self.take_through(lambda char: False)
            return
        self.arguments("{}" if lead == "{" else "}")
        if not marker:
            self.content(space)

    def _value(self, is_string: bool) -> Wait[str]:
        """Read one value; returns the marker that ended it."""
        ends = (PARAMETER_END,) if self._is_exact else _VALUE_ENDS
        if is_string:
            self.arguments('"')
            marker = yield from self.take_until(ends, lambda text: self.arguments(_escaped(text)))
            if marker:
                self.arguments('"')
            return marker
        pieces: list[str] = []
        marker = yield from self.take_until(ends, pieces.append)
        if marker:
            self.arguments(_as_json("".join(pieces)))
        return marker


class DsmlV32ToolParser(DsmlToolParser):
    """The same in V3.2's form."""

    block = "function_calls"


def _spec(form: Mapping[str, Any]) -> GrammarSpec:
    text = grammar_text({"type": "structural_tag", "format": form})
    return GrammarSpec("structural_tag", text, "tools")


def _calls(calls: Sequence[Mapping[str, Any]], parallel: bool) -> dict[str, Any]:
    return {
        "type": "tags_with_separator",
        "tags": calls,
        "separator": "",  # each call ends with a line break
        "at_least_one": True,
        "stop_after_first": not parallel,
    }


def _call_tag(function: Mapping[str, Any], budget: Budget | None) -> dict[str, Any]:
    """A call whose parameters fit the function's; raises SchemaError."""
    schema = _objects(parameters_of(function, budget))
    _refuse_ends(schema, True)
    content = {
        "type": "json_schema",
        "json_schema": _listed(schema) if function.get("strict") is True else schema,
        "style": "deepseek_xml",
        "max_whitespace_cnt": _MAX_WHITESPACE,
    }
    return _tag(function, content)


def _refuse_ends(schema: Any, is_outer: bool = False) -> None:
    """Raise SchemaError if a value or name that the schema demands holds the end of a parameter.

    DSML has no way to write it: DeepSeek's own encoder does not escape it. Only the names of
    parameters, which `is_outer` says of an object's, are in quotation marks of the markup."""
    if isinstance(schema, list):
        for each in schema:
            _refuse_ends(each, is_outer)
    if not isinstance(schema, Mapping):
        return
    pattern = schema.get("pattern", "")
    names = [] if is_outer else list(schema.get("properties") or {})
    demanded = [schema.get("enum"), schema.get("const"), names, re.sub(r"\\(.)", r"\1", pattern)]
    if any(PARAMETER_END in json.dumps(value, ensure_ascii=False) for value in demanded):
        raise SchemaError(f"DSML cannot write a value that holds {PARAMETER_END}")
    for key in ("anyOf", "oneOf", "allOf"):
        _refuse_ends(schema.get(key), is_outer)
    for key in ("items", "prefixItems", "additionalProperties", "not"):
        _refuse_ends(schema.get(key))
    for key in ("properties", "patternProperties", "$defs"):
        _refuse_ends(list((schema.get(key) or {}).values()))


def _objects(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without what is not an object, because DSML can write nothing else.

    Raises SchemaError if nothing is left."""
    definitions = schema.get("$defs", {})
    found = _target(schema, definitions)
    branches = found.get("anyOf", [found])
    kept = [each for each in branches if _is_of_objects(_target(each, definitions))]
    if not kept:
        raise SchemaError("DSML can write only parameters that are an object")
    if len(kept) == len(branches):
        return schema
    found = {**found, "anyOf": kept}
    return {**found, "$defs": definitions} if definitions else found


def _is_of_objects(schema: Mapping[str, Any]) -> bool:
    values = schema.get("enum", ())
    return schema.get("type", "object") == "object" and all(isinstance(v, dict) for v in values)


def _tag(function: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "type": "tag",
        "begin": f'{INVOKE}{function["name"]}">\n',
        "content": content,
        "end": f"{INVOKE_END}\n",
    }


def _listed(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A strict schema of parameters that the compiler enforces in DSML, too.

    There it would allow a further parameter with the name of a listed one, so an object with listed
    properties gets no others. Raises SchemaError if it needs others."""
    definitions = schema.get("$defs", {})
    found = _target(schema, definitions)
    if "anyOf" in found:
        found = {**found, "anyOf": [_choice(each, definitions) for each in found["anyOf"]]}
    else:
        found = _closed(found)
    return {**found, "$defs": definitions} if definitions else found


def _target(schema: Mapping[str, Any] | bool, definitions: Mapping[str, Any]) -> dict[str, Any]:
    """The schema itself, or what its `$ref` refers to: never another `$ref`.

    Raises SchemaError for true and false, which are schemas as well."""
    found: Mapping[str, Any] | bool = schema
    if isinstance(schema, Mapping) and "$ref" in schema:
        found = definitions[schema["$ref"].removeprefix("#/$defs/")]
    if isinstance(found, bool):
        raise SchemaError("parameters that may have any form cannot be enforced in DSML")
    return dict(found)


def _choice(schema: Mapping[str, Any] | bool, definitions: Mapping[str, Any]) -> Mapping[str, Any]:
    """A branch of the parameters' choice; those behind a `$ref` stay as they are."""
    found = _target(schema, definitions)
    if "anyOf" in found:
        raise SchemaError("parameters that are a choice of choices cannot be enforced in DSML")
    closed = _closed(found)
    if isinstance(schema, bool) or "$ref" not in schema:
        return closed
    if closed != found:
        raise SchemaError("'additionalProperties' behind a '$ref' cannot be enforced in DSML")
    return schema


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties") or {}
    if any('"' in name for name in properties):
        raise SchemaError("DSML cannot write a parameter's name with a quotation mark")
    if not properties or schema.get("additionalProperties") in (None, False):
        return schema
    if schema.get("minProperties", 0) > len(properties):
        raise SchemaError("'minProperties' demands parameters that are not listed")
    return {**schema, "additionalProperties": False}


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _as_json(text: str) -> str:
    """The value as JSON text; a string of it if it is not JSON."""
    try:
        return json_text(read_json(text.strip()))
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
