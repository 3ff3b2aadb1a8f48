"""What completions and chat answer, as msgspec structs: one is encoded for every streamed chunk."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

encode = msgspec.json.Encoder().encode
"""One reply or chunk as JSON bytes."""


class PromptTokensDetails(msgspec.Struct):
    """Of the prompt's tokens, those served from the prefix cache."""

    cached_tokens: int = 0
    audio_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    """Of the output's tokens, those of reasoning; and the fate of predicted tokens."""

    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(msgspec.Struct):
    """Token counts of one request, all choices together."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class PromptLogprob(msgspec.Struct):
    """One candidate at one position of the prompt (vLLM's `prompt_logprobs`)."""

    logprob: float
    rank: int | None
    decoded_token: str


class SpeculativeMetrics(msgspec.Struct, omit_defaults=True):
    """Acceptance of one request's drafts, all choices together (vLLM's shape)."""

    mean_acceptance_length: float  # tokens per verification step, the target's own included
    draft_acceptance_rate: float
    acceptance_histogram: list[int]  # [K + 1] steps that accepted so many drafts
    acceptance_histogram_by_draft_length: dict[str, list[int]]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int  # K
    per_step_accepted: list[int] | UnsetType = UNSET
    per_step_drafted: list[int] | UnsetType = UNSET


class ReplyMetrics(msgspec.Struct):
    """Facts about one request beside its usage."""

    speculative_decoding: SpeculativeMetrics


PromptLogprobs = list[dict[str, PromptLogprob] | None]


# --- completions --------------------------------------------------------------------------------


class CompletionLogprobs(msgspec.Struct):
    """Completions' logprobs: four parallel lists."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


class CompletionChoice(msgspec.Struct):
    """One text; the same shape streamed and whole."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class Completion(msgspec.Struct):
    """The reply of /v1/completions and each chunk of its stream."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    object: str = "text_completion"
    usage: Usage | None | UnsetType = UNSET
    metrics: ReplyMetrics | UnsetType = UNSET


# --- chat ---------------------------------------------------------------------------------------


class TopLogprob(msgspec.Struct):
    """One candidate at one position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    """The token at one position and the likeliest candidates."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Chat's logprobs."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct):
    """Name and arguments (JSON text); in a stream, each may be missing from a delta."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ReplyToolCall(msgspec.Struct):
    """A tool call of the reply; `index` only in streams."""

    function: CalledFunction
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET
    index: int | UnsetType = UNSET


class ChatMessage(msgspec.Struct):
    """The assistant's message."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ReplyToolCall] | UnsetType = UNSET
    function_call: CalledFunction | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One message of a whole reply."""

    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: ChatLogprobs | None = None
    stop_reason: int | str | None | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    """The reply of /v1/chat/completions."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    service_tier: str = "default"
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    metrics: ReplyMetrics | UnsetType = UNSET


class Delta(msgspec.Struct, omit_defaults=True):
    """What a chunk adds to a message; what is not there is omitted."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ReplyToolCall] | None = None
    function_call: CalledFunction | None = None


class ChunkChoice(msgspec.Struct):
    """One choice's part of a chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    """One chunk of a chat stream."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    object: str = "chat.completion.chunk"
    usage: Usage | None | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    metrics: ReplyMetrics | UnsetType = UNSET
