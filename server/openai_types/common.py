"""Request fields shared by completions and chat: types and ranges, independent of the model.

Bodies are strict (no "5" for 5), allow unknown fields, and accept null wherever a default exists.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, model_validator

MAX_STOPS = 16
MAX_STOP_LENGTH = 4096  # characters
MAX_WORD_LENGTH = 1024  # characters of one of `bad_words`
MAX_CHOICES = 128
MAX_CACHE_SALT = 256  # characters
MAX_ALLOWED = 1 << 18  # ids; larger than any vocabulary
INT32 = 2**31 - 1
INT64 = 2**63 - 1


def _integral(value: object) -> object:
    # JSON has one number type, so 5.0 is an integer too.
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _of_at_most(count: int) -> Callable[[object], object]:
    """A validator that limits an object's members before each of them is checked."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > count:
            raise ValueError(f"expected at most {count} members, not {len(value)}")
        return value

    return check


Integer = Annotated[int, BeforeValidator(_integral)]
TokenId = Annotated[int, Field(ge=0, le=INT32)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_WORD_LENGTH)]
Item = TypeVar("Item")
# A list that is checked up to its first invalid item: reporting all could take minutes.
Many = Annotated[list[Item], Field(fail_fast=True)]
Metadata = Annotated[dict[str, str], Field(max_length=16), BeforeValidator(_of_at_most(16))]
MAX_BIASES = 1024
Biases = Annotated[
    dict[str, float], Field(max_length=MAX_BIASES), BeforeValidator(_of_at_most(MAX_BIASES))
]


class Body(BaseModel):
    """A JSON object in a request. Unknown fields are kept in `model_extra`."""

    model_config = ConfigDict(extra="allow", strict=True, populate_by_name=True)


# Weight of a byte in a request with a schema: analysing 2 kB of nested choices takes 10 ms.
SCHEMA_WEIGHT = 8


class SizedBody(Body):
    """The body of a whole request with its size, which decides where it is processed."""

    _num_bytes: int = PrivateAttr(0)

    @property
    def num_bytes(self) -> int:
        """The size of the request's body in bytes."""
        return self._num_bytes

    @property
    def has_schema(self) -> bool:
        """Whether the request contains a schema, pattern or grammar."""
        return False

    @property
    def analysis_bytes(self) -> int:
        """The size as `by_size` takes it for analysing the output format: schemas weigh more."""
        return self._num_bytes * (SCHEMA_WEIGHT if self.has_schema else 1)

    def note_size(self, num_bytes: int) -> None:
        """Set the size of the body in bytes."""
        self._num_bytes = num_bytes


class StreamOptions(Body):
    """`stream_options`: what a stream contains besides text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(Body):
    """`response_format.json_schema`."""

    name: str | None = Field(None, max_length=256)
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    """`response_format`."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _schema_present(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("json_schema is required when type is 'json_schema'")
        return self


class StructuredOutputs(Body):
    """vLLM's `structured_outputs`; exactly one field may be set."""

    json_: dict[str, Any] | str | bool | None = Field(None, alias="json")
    regex: str | None = None
    choice: Many[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None


class Speculative(Body):
    """`speculative`: control of speculative decoding for one request."""

    enabled: bool | None = None
    max_tokens: Integer | None = Field(None, ge=0, le=INT32)
    metrics: Literal["none", "summary", "detailed"] | None = None  # overrides the server's setting
    steps: bool | None = None  # a stream names the tokens and rejected drafts of each step

    @model_validator(mode="after")
    def _knows_all(self) -> Speculative:
        unknown = sorted(self.model_extra or ())
        if unknown:  # our own extension, so an unknown key can only be a mistake
            known = ", ".join(type(self).model_fields)
            raise ValueError(f"unknown key {unknown[0][:40]!r}; the known keys are {known}")
        return self


class TextPart(Body):
    """A text part of a message's content."""

    type: str
    text: str | None = None

    @model_validator(mode="after")
    def _text_only(self) -> TextPart:
        if self.type not in ("text", "input_text", "output_text", "refusal"):
            raise ValueError(f"content of type {self.type[:40]!r} is not supported, only text")
        if self.text is None and not isinstance((self.model_extra or {}).get("refusal"), str):
            raise ValueError("a text part needs the field 'text'")
        return self

    @property
    def content(self) -> str:
        return self.text if self.text is not None else str((self.model_extra or {})["refusal"])


Content = str | Many[TextPart]


def content_text(content: Content | None) -> str:
    """The text of a message's content; parts are joined by line breaks."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.content for part in content)


class Prediction(Body):
    """OpenAI's predicted output: text that the reply is expected to repeat."""

    type: Literal["content"] = "content"
    content: Content


class GenerationBody(SizedBody):
    """The sampling and output parameters that completions and chat share."""

    model: str = Field(max_length=1024)
    n: Integer | None = Field(None, ge=1, le=MAX_CHOICES)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: Integer | None = Field(None, ge=-INT64 - 1, le=INT64)
    user: str | None = None
    metadata: Metadata | None = None
    store: bool | None = None  # accepted without effect, as are the next three
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_CACHE_SALT)
    priority: Integer | None = Field(None, ge=-INT32, le=INT32)

    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: Integer | None = Field(None, ge=-1, le=INT32)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    logit_bias: Biases | None = None
    allowed_token_ids: Many[TokenId] | None = Field(None, min_length=1, max_length=MAX_ALLOWED)
    bad_words: Many[BadWord] | None = Field(None, max_length=1024)

    stop: StopString | Many[StopString] | None = None
    stop_token_ids: Many[TokenId] | None = Field(None, max_length=1024)
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: Integer | None = Field(None, ge=0, le=INT32)
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None  # without effect: none are added
    use_beam_search: bool | None = None

    prompt_logprobs: Integer | None = Field(None, ge=0, le=INT32)
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: Integer | None = Field(None, ge=-1, le=INT32)
    add_special_tokens: bool | None = None

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: Many[str] | None = None
    guided_grammar: str | None = None
    speculative: Speculative | None = None
    prediction: Prediction | None = None

    @property
    def has_schema(self) -> bool:
        form = self.response_format
        given = (self.structured_outputs, self.guided_json, self.guided_regex, self.guided_grammar)
        return any(each is not None for each in given) or (form is not None and form.type != "text")

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_steps(self) -> bool:
        """Whether the stream names the tokens and rejected drafts of each step."""
        return self.speculative is not None and bool(self.speculative.steps)

    @property
    def wants_running_usage(self) -> bool:
        """Whether every chunk of the stream contains the usage so far."""
        options = self.stream_options
        return self.wants_usage and options is not None and bool(options.continuous_usage_stats)
