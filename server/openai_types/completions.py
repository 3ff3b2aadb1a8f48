"""The body of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

from .common import INT32, GenerationBody, Integer, TokenId


def _prompt(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    try:
        return handler(value)
    except ValidationError:
        raise ValueError(
            "expected a non-empty text, list of texts, list of token ids or list of such lists"
        ) from None


_Text = Annotated[str, Field(min_length=1)]
_Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Prompt = Annotated[
    _Text
    | Annotated[list[_Text], Field(min_length=1, max_length=2048, fail_fast=True)]
    | _Ids
    | Annotated[list[_Ids], Field(min_length=1, max_length=2048, fail_fast=True)],
    WrapValidator(_prompt),
]


class CompletionRequest(GenerationBody):
    """The body of `POST /v1/completions`."""

    prompt: Prompt
    max_tokens: Integer | None = Field(None, ge=0, le=INT32)
    best_of: Integer | None = Field(None, ge=1, le=128)
    echo: bool | None = None
    logprobs: Integer | None = Field(None, ge=0, le=INT32)
    suffix: str | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The prompts, each a text or token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt
