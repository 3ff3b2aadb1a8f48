"""Log probabilities of tokens in OpenAI's two forms, and vLLM's form for those of the prompt.

Token ids become texts here; numbers that JSON cannot carry become -9999.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..runner.messages import TokenLogprobs
from .choice import TokenEntry
from .openai_types.replies import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from .tokenizer import Tokenizer

_LEAST = -9999.0


def _finite(logprob: float) -> float:
    return logprob if logprob > _LEAST else _LEAST  # also for NaN


def chat_logprobs(entries: Sequence[TokenEntry], tokenizer: Tokenizer) -> ChatLogprobs:
    """Chat's form. The stop token, which has no text in the message, has none here either."""
    return ChatLogprobs([_chat_entry(entry, tokenizer) for entry in entries])


def _chat_entry(entry: TokenEntry, tokenizer: Tokenizer) -> ChatTokenLogprob:
    found = entry.logprobs
    data = b"" if entry.hidden else tokenizer.token_bytes(found.token_id)
    return ChatTokenLogprob(
        token=data.decode("utf-8", "replace"),
        logprob=_finite(found.logprob),
        bytes=list(data),
        top_logprobs=[
            TopLogprob(tokenizer.token_text(i), _finite(lp), list(tokenizer.token_bytes(i)))
            for i, lp in zip(found.top_ids, found.top_logprobs, strict=True)
        ],
    )


def completion_logprobs(
    entries: Sequence[TokenEntry], tokenizer: Tokenizer, start: int = 0
) -> CompletionLogprobs:
    """Completions' form; `start` is the length of an echoed prompt."""
    return CompletionLogprobs(
        text_offset=[start + entry.offset for entry in entries],
        token_logprobs=[_finite(entry.logprobs.logprob) for entry in entries],
        tokens=[
            "" if entry.hidden else _spelled(entry.logprobs.token_id, tokenizer)
            for entry in entries
        ],
        top_logprobs=[_top(entry.logprobs, tokenizer) for entry in entries],
    )


def echoed_logprobs(
    ids: Sequence[int], found: Sequence[TokenLogprobs | None], tokenizer: Tokenizer, text: str
) -> CompletionLogprobs:
    """Completions' form of a prompt that is echoed as `text`; its first token has none."""
    pieces = tokenizer.detokenizer(True).push_tokens(ids)
    if "".join(pieces) != text:  # the text spells special tokens
        pieces = tokenizer.detokenizer(False).push_tokens(ids)
    offsets, length = [], 0
    for piece in pieces:
        offsets.append(min(length, len(text)))
        length += len(piece)
    return CompletionLogprobs(
        text_offset=offsets,
        token_logprobs=[None if entry is None else _finite(entry.logprob) for entry in found],
        tokens=[_spelled(i, tokenizer) for i in ids],
        top_logprobs=[None if entry is None else _top(entry, tokenizer) for entry in found],
    )


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """One after the other."""
    return CompletionLogprobs(
        first.text_offset + second.text_offset,
        first.token_logprobs + second.token_logprobs,
        first.tokens + second.tokens,
        (first.top_logprobs or []) + (second.top_logprobs or []),
    )


def prompt_logprobs(found: Sequence[TokenLogprobs | None], tokenizer: Tokenizer) -> PromptLogprobs:
    """vLLM's form: for every prompt token a map from id to what is known of it."""
    return [None if entry is None else _by_id(entry, tokenizer) for entry in found]


def _by_id(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, PromptLogprob]:
    own = PromptLogprob(_finite(entry.logprob), entry.rank, tokenizer.token_text(entry.token_id))
    ranked = zip(entry.top_ids, entry.top_logprobs, strict=True)
    top = {
        str(i): PromptLogprob(_finite(lp), rank, tokenizer.token_text(i))
        for rank, (i, lp) in enumerate(ranked, start=1)
    }
    return {str(entry.token_id): own, **top}


def _spelled(token_id: int, tokenizer: Tokenizer) -> str:
    """A token's text; a part of a character as OpenAI spells it: bytes:\\xf0\\x9f.

    Completions key their candidates by text, so parts of characters need names that differ.
    """
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(chr(b) if 32 <= b < 127 else f"\\x{b:02x}" for b in data)


def _top(entry: TokenLogprobs, tokenizer: Tokenizer) -> dict[str, float]:
    """The likeliest tokens and the chosen one; of tokens with the same text, the likelier."""
    top: dict[str, float] = {}
    for i, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
        top.setdefault(_spelled(i, tokenizer), _finite(logprob))
    top.setdefault(_spelled(entry.token_id, tokenizer), _finite(entry.logprob))
    return top
