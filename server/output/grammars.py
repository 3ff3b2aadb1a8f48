"""Builds a request's grammar from response_format, structured_outputs and guided_*.

Their contents are checked here, so that an error is a 400 that names the parameter, before the
request reaches the engine.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ...runner.messages import GrammarSpec
from ..errors import InvalidRequest
from ..json_schema import MAX_GRAMMAR_CHARS, Budget, SchemaError, check_shape, prepare_schema
from ..json_schema.regex_syntax import HalfSurrogate, RegexError, join_surrogates
from ..json_schema.regex_text import whole_regex
from ..json_schema.shape import MAX_GIVEN_PARTS, MAX_PARTS
from ..openai_types.common import GenerationBody

MAX_JSON_CHARS = 1 << 18  # characters of JSON sent as a string
_MAX_TEXT_DEPTH = 64  # nesting levels, the same limit as for bodies


def grammar_of(body: GenerationBody) -> GrammarSpec | None:
    """The grammar of response_format, structured_outputs or guided_*, or None.

    Raises InvalidRequest if more than one is set, or one is invalid.
    """
    return _only([("response_format", _response_format(body)), *_whole_outputs(body)])


def grammar_of_calls(body: GenerationBody) -> GrammarSpec | None:
    """The grammar of a request that forces tool calls, or None.

    response_format constrains only text, and such a reply has none, so it is checked and ignored.
    structured_outputs and guided_* constrain the whole output and still apply.
    """
    named = body.response_format.json_schema if body.response_format else None
    if named is not None and named.schema_ is not None:
        try:
            check_shape(named.schema_)
        except SchemaError as error:
            raise _wrong_schema("response_format", error) from None
    return _only(_whole_outputs(body))


def _only(found: list[tuple[str, GrammarSpec | None]]) -> GrammarSpec | None:
    named = [(param, value) for param, value in found if value is not None]
    if len(named) > 1:
        names = " and ".join(f"'{param}'" for param, _ in named)
        raise InvalidRequest(f"Only one of {names} may be given.", named[1][0], "invalid_value")
    return named[0][1] if named else None


def _whole_outputs(body: GenerationBody) -> list[tuple[str, GrammarSpec | None]]:
    return [*_structured(body), *_guided(body)]


def _response_format(body: GenerationBody) -> GrammarSpec | None:
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return GrammarSpec("json_object", param="response_format")
    if wanted.type == "structural_tag":
        return _structural_tag(wanted.model_dump(exclude_none=True), "response_format")
    named = wanted.json_schema
    schema = {} if named is None or named.schema_ is None else named.schema_
    strict = named is not None and named.strict is True
    return json_schema_grammar(schema, "response_format", strict)


def _structured(body: GenerationBody) -> list[tuple[str, GrammarSpec | None]]:
    wanted = body.structured_outputs
    if wanted is None:
        return []
    name = "structured_outputs"
    return [
        (f"{name}.json", json_schema_grammar(wanted.json_, name)),
        (f"{name}.regex", _regex(wanted.regex, name)),
        (f"{name}.choice", _choice(wanted.choice, name)),
        (f"{name}.grammar", _grammar(wanted.grammar, name)),
        (
            f"{name}.json_object",
            GrammarSpec("json_object", param=name) if wanted.json_object else None,
        ),
        (f"{name}.structural_tag", _structural_tag(wanted.structural_tag, name)),
    ]


def _guided(body: GenerationBody) -> list[tuple[str, GrammarSpec | None]]:
    return [
        ("guided_json", json_schema_grammar(body.guided_json, "guided_json")),
        ("guided_regex", _regex(body.guided_regex, "guided_regex")),
        ("guided_choice", _choice(body.guided_choice, "guided_choice")),
        ("guided_grammar", _grammar(body.guided_grammar, "guided_grammar")),
    ]


def json_schema_grammar(schema: Any, param: str, strict: bool = True) -> GrammarSpec | None:
    """The grammar of a JSON schema, which may be given as JSON text.

    Keywords that cannot be enforced raise InvalidRequest if `strict`, else they are ignored.
    """
    if schema is None:
        return None
    if isinstance(schema, str):
        schema = _parsed(schema, param)
    if not isinstance(schema, dict | bool):
        raise _invalid(param, "a JSON schema must be an object")
    try:
        text = _encode(prepare_schema(schema, strict))
    except SchemaError as error:
        raise _wrong_schema(param, error) from None
    return GrammarSpec("json_schema", _short(text, param, "schema"), param)


def _parsed(text: str, param: str) -> Any:
    """Parse JSON given as a string, with the rules for bodies: no NaN, no lone surrogates."""
    if len(text) > MAX_JSON_CHARS:
        raise _invalid(param, f"its text is longer than {MAX_JSON_CHARS} characters")
    try:
        value = msgspec.json.decode(text)
    except RecursionError:
        raise _invalid(param, "its text is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeError) as error:
        raise _invalid(param, f"its text is not JSON: {str(error).rstrip('.')}") from None
    level = [value]
    for _ in range(_MAX_TEXT_DEPTH + 1):
        outer = [each for each in level if isinstance(each, dict | list)]
        if not outer:
            return value
        level = [v for each in outer for v in (each.values() if isinstance(each, dict) else each)]
    raise _invalid(param, f"its text is nested more than {_MAX_TEXT_DEPTH} levels deep")


def _regex(value: str | None, param: str) -> GrammarSpec | None:
    if value is None:
        return None
    try:
        whole_regex(_given(value, param))
        return GrammarSpec("regex", join_surrogates(value), param)
    except RegexError as error:
        raise _invalid(param, f"the regular expression {error}") from None


def _grammar(value: str | None, param: str) -> GrammarSpec | None:
    if value is None:
        return None
    try:
        return GrammarSpec("grammar", join_surrogates(_given(value, param)), param)
    except HalfSurrogate as error:
        raise _invalid(param, f"the grammar {error}") from None


def _given(value: str, param: str) -> str:
    if not value:
        raise _invalid(param, "it is empty")
    return _short(value, param, "text")


def _choice(choices: list[str] | None, param: str) -> GrammarSpec | None:
    if choices is None:
        return None
    if not choices or "" in choices:
        raise _invalid(param, "expected a list of non-empty strings")
    return GrammarSpec("choice", _short(_encode(choices), param, "list"), param)


def _structural_tag(given: dict[str, Any] | str | None, param: str) -> GrammarSpec | None:
    """The grammar of a structural tag, with its schemas and patterns prepared."""
    if given is None:
        return None
    tag = _parsed(given, param) if isinstance(given, str) else given
    if not isinstance(tag, dict):
        raise _invalid(param, "a structural tag must be an object")
    try:
        text = _encode(_prepared_tag(tag, Budget(MAX_PARTS), Budget(MAX_GIVEN_PARTS)))
    except (SchemaError, RegexError) as error:
        why = f"a pattern or grammar {error}" if isinstance(error, RegexError) else str(error)
        raise _invalid(param, f"in the structural tag, {why}") from None
    return GrammarSpec("structural_tag", _short(text, param, "structural tag"), param)


def _prepared_tag(tag: Any, budget: Budget, given: Budget) -> Any:
    """A copy with all schemas, patterns and grammars prepared. The body limits bound its depth."""
    if isinstance(tag, list):
        return [_prepared_tag(each, budget, given) for each in tag]
    if not isinstance(tag, dict):
        return tag
    found: dict[str, Any] = {}
    for name, value in tag.items():
        new_form = name == "json_schema" and tag.get("type") == "json_schema"
        if new_form or (name == "schema" and "begin" in tag):
            check_shape(value, given)
            found[name] = prepare_schema(value, False, budget)
        elif name in ("pattern", "regex", "grammar") and isinstance(value, str):
            found[name] = join_surrogates(value)
        else:
            found[name] = _prepared_tag(value, budget, given)
    return found


def _short(text: str, param: str, what: str) -> str:
    if len(text) > MAX_GRAMMAR_CHARS:
        limit = f"the maximum is {MAX_GRAMMAR_CHARS}"
        raise _invalid(param, f"the {what} has {len(text)} characters; {limit}")
    return text


def _wrong_schema(param: str, error: SchemaError) -> InvalidRequest:
    return InvalidRequest(f"Invalid schema for '{param}': {error}.", param, "invalid_value")


def _invalid(param: str, reason: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid value for '{param}': {reason}.", param, "invalid_value")


def _encode(value: Any) -> str:
    return msgspec.json.encode(value).decode()
