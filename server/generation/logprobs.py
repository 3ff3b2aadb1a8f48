"""Converts log probabilities to OpenAI's two forms, and those of prompts to vLLM's form.

Token ids become text. Values that JSON cannot represent (-inf, NaN) become -9999.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...runner.messages import TokenLogprobs
from ..openai_types.replies import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TopLogprob,
)
from ..text.choice_text import TokenEntry
from ..text.tokenizer import Tokenizer

_LEAST = -9999.0


def _finite(logprob: float) -> float:
    return logprob if logprob > _LEAST else _LEAST  # also for NaN


def chat_logprobs(
    entries: Sequence[TokenEntry], tokenizer: Tokenizer, as_ids: bool = False
) -> ChatLogprobs:
    """The log probabilities of a chat choice.

    `as_ids` names tokens by id (vLLM's `return_tokens_as_token_ids`). Tokens without text in the
    message, such as the stop token, have an empty text here, so that the tokens together spell the
    message.
    """
    return ChatLogprobs([_chat_entry(entry, tokenizer, as_ids) for entry in entries])


def _chat_entry(entry: TokenEntry, tokenizer: Tokenizer, as_ids: bool) -> ChatTokenLogprob:
    found = entry.logprobs

    def spelled(token_id: int) -> tuple[str, list[int]]:
        hidden = entry.hidden and token_id == found.token_id
        data = b"" if hidden else tokenizer.token_bytes(token_id)
        return _id_name(token_id) if as_ids else data.decode("utf-8", "replace"), list(data)

    token, own_bytes = spelled(found.token_id)
    top = []
    for token_id, logprob in zip(found.top_ids, found.top_logprobs, strict=True):
        rival, rival_bytes = spelled(token_id)
        top.append(TopLogprob(rival, _finite(logprob), rival_bytes))
    return ChatTokenLogprob(token, _finite(found.logprob), own_bytes, top)


def _id_name(token_id: int) -> str:
    return f"token_id:{token_id}"


def completion_logprobs(
    entries: Sequence[TokenEntry], tokenizer: Tokenizer, start: int = 0, as_ids: bool = False
) -> CompletionLogprobs:
    """The log probabilities of a completion's output.

    `start` is the length of the echoed prompt in characters; it is added to all text offsets.
    """
    names = [_names(entry.logprobs, entry.hidden, tokenizer, as_ids) for entry in entries]
    return CompletionLogprobs(
        text_offset=[start + entry.offset for entry in entries],
        token_logprobs=[_finite(entry.logprobs.logprob) for entry in entries],
        tokens=[name(e.logprobs.token_id) for name, e in zip(names, entries, strict=True)],
        top_logprobs=[_top(e.logprobs, name) for name, e in zip(names, entries, strict=True)],
    )


def _names(
    found: TokenLogprobs, hidden: bool, tokenizer: Tokenizer, as_ids: bool
) -> Callable[[int], str]:
    """A function from token id to text for the candidates at one position.

    If the chosen token is `hidden`, its text is empty.
    """

    def name(token_id: int) -> str:
        if as_ids:
            return _id_name(token_id)
        return "" if hidden and token_id == found.token_id else _spelled(token_id, tokenizer)

    return name


def echoed_logprobs(
    ids: Sequence[int],
    found: Sequence[TokenLogprobs | None],
    tokenizer: Tokenizer,
    text: str,
    as_ids: bool = False,
) -> CompletionLogprobs:
    """The log probabilities of a prompt that is echoed as `text`; its first token has none."""
    reader = tokenizer.detokenizer(True)
    pieces = reader.push_tokens(ids)
    if "".join(pieces) != text:  # then the text includes special tokens
        reader = tokenizer.detokenizer(False)
        pieces = reader.push_tokens(ids)

    def name(token_id: int) -> str:
        if as_ids:
            return _id_name(token_id)
        return "" if token_id in reader.dropped else _spelled(token_id, tokenizer)

    def top(entry: TokenLogprobs) -> dict[str, float]:
        return _top(entry, _names(entry, entry.token_id in reader.dropped, tokenizer, as_ids))

    offsets, length = [], 0
    for piece in pieces:
        offsets.append(min(length, len(text)))
        length += len(piece)
    return CompletionLogprobs(
        text_offset=offsets,
        token_logprobs=[None if entry is None else _finite(entry.logprob) for entry in found],
        tokens=[name(i) for i in ids],
        top_logprobs=[None if entry is None else top(entry) for entry in found],
    )


def joined(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """The entries of `first`, followed by those of `second`."""
    return CompletionLogprobs(
        first.text_offset + second.text_offset,
        first.token_logprobs + second.token_logprobs,
        first.tokens + second.tokens,
        (first.top_logprobs or []) + (second.top_logprobs or []),
    )


def prompt_logprobs(found: Sequence[TokenLogprobs | None], tokenizer: Tokenizer) -> PromptLogprobs:
    """vLLM's form: a map from token id to log probability, rank and text for each prompt token."""
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
    """A token's text; incomplete UTF-8 is spelled as OpenAI does: bytes:\\xf0\\x9f.

    Completions key their candidates by text, so different incomplete characters need different
    names.
    """
    data = tokenizer.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(chr(b) if 32 <= b < 127 else f"\\x{b:02x}" for b in data)


def _top(entry: TokenLogprobs, name: Callable[[int], str]) -> dict[str, float]:
    """The log probabilities of the top tokens and of the chosen one, by text.

    If several tokens have the same text, the likeliest one counts.
    """
    top: dict[str, float] = {}
    for i, logprob in zip(entry.top_ids, entry.top_logprobs, strict=True):
        top.setdefault(name(i), _finite(logprob))
    top.setdefault(name(entry.token_id), _finite(entry.logprob))
    return top
