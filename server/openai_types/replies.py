"""Replies and chunks of completions and chat, as msgspec structs, which are fast to encode."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType

encode = msgspec.json.Encoder().encode
"""One reply or chunk as JSON bytes."""


class PromptTokensDetails(msgspec.Struct):
    """The breakdown of a prompt's tokens; cached ones came from the prefix cache."""

    cached_tokens: int = 0
    audio_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct):
    """The number of reasoning tokens in the output, and of predicted tokens by outcome."""

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
    """A candidate token at a position of the prompt (vLLM's `prompt_logprobs`)."""

    logprob: float
    rank: int | None
    decoded_token: str


class SpeculativeMetrics(msgspec.Struct, omit_defaults=True):
    """The acceptance of one request's drafts, all choices together (vLLM's format)."""

    mean_acceptance_length: float  # tokens per verification step, including the target's own
    draft_acceptance_rate: float
    acceptance_histogram: list[int]  # [K + 1] number of accepted drafts -> steps
    acceptance_histogram_by_draft_length: dict[str, list[int]]
    num_spec_steps: int
    num_accepted_draft_tokens: int
    num_draft_tokens: int
    num_spec_tokens: int  # K
    per_step_accepted: list[int] | UnsetType = UNSET
    per_step_drafted: list[int] | UnsetType = UNSET


class ReplyMetrics(msgspec.Struct):
    """Measurements of one request besides its usage."""

    speculative_decoding: SpeculativeMetrics


class SpeculativeStep(msgspec.Struct):
    """What one step of the engine added to a choice (`"speculative": {"steps": true}`)."""

    tokens: list[str]  # together they spell the text; a token that completes no character is ""
    num_accepted: int  # the first tokens, which are accepted drafts; the target drew the last one
    rejected: list[str]  # the drafts after those, which the target rejected


PromptLogprobs = list[dict[str, PromptLogprob] | None]


# --- completions --------------------------------------------------------------------------------


class CompletionLogprobs(msgspec.Struct):
    """The log probabilities of a completion, as four parallel lists."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None] | None


class CompletionChoice(msgspec.Struct):
    """A choice of a completion, whole or as a part in a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    speculative_steps: list[SpeculativeStep] | UnsetType = UNSET


class Completion(msgspec.Struct):
    """The reply of /v1/completions, and a chunk of its stream."""

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
    """A candidate token at one position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(msgspec.Struct):
    """The chosen token at one position, and the likeliest candidates."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """The log probabilities of a chat choice."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct):
    """The name and arguments (JSON text) of a call; a stream's delta may lack either."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ReplyToolCall(msgspec.Struct):
    """A tool call in a reply. `index` is set only in streams."""

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
    """A choice of a whole chat reply."""

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
    """The part of a message in a chunk; unset fields are omitted."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[ReplyToolCall] | None = None
    function_call: CalledFunction | None = None


class ChunkChoice(msgspec.Struct):
    """A choice in a chunk of a chat stream."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    speculative_steps: list[SpeculativeStep] | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    """A chunk of a chat stream."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChunkChoice]
    object: str = "chat.completion.chunk"
    usage: Usage | None | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    metrics: ReplyMetrics | UnsetType = UNSET
