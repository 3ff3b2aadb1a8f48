"""Converts a request body to the worker's SamplingParams: defaults, limits of the model, token ids.

It does not know whether the request is a completion or a chat.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from ...runner.messages import MAX_BAD_WORD_TOKENS, GrammarSpec, Ready, SamplingParams
from ..errors import InvalidRequest
from ..openai_types.common import INT64, MAX_STOPS, GenerationBody, content_text
from ..text.tokenizer import Tokenizer
from .grammars import grammar_of

# Log probabilities of prompt tokens in one reply; each needs 400 bytes while the reply is built.
MAX_PROMPT_LOGPROBS = 1 << 20
MIN_TEMPERATURE = 1e-5
_PREDICTED_CHARACTERS = 8  # characters of `prediction` that are read, per token of context


@dataclass(frozen=True)
class ModelLimits:
    """The limits of the model against which requests are checked."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_logprobs: int

    @classmethod
    def of(cls, ready: Ready, tokenizer: Tokenizer, max_logprobs: int) -> ModelLimits:
        """The limits, from the worker's and the tokenizer's facts."""
        eos = frozenset(ready.eos_token_ids) | tokenizer.eos_ids
        return cls(ready.max_model_len, ready.vocab_size, eos, max_logprobs)


def sampling_params(
    body: GenerationBody,
    limits: ModelLimits,
    tokenizer: Tokenizer,
    seeds: random.Random,
    logprobs: int | None,
    echo_logprobs: int | None = None,
    grammar: GrammarSpec | None = None,
) -> SamplingParams:
    """The parameters for choice 0 of a prompt, with max_tokens 0 (see `with_max_tokens`).

    A request without a seed gets a random one of 63 bits; choice i uses seed + i. `logprobs` and
    `echo_logprobs` are the numbers of alternatives per output token and per token of an echoed
    prompt. `grammar` replaces that of the body. Raises InvalidRequest.
    """
    check_logprobs(body, logprobs, limits.max_logprobs)
    check_stops(body)
    check_steps(body)
    if body.use_beam_search:
        raise InvalidRequest(
            "'use_beam_search' is not supported.", "use_beam_search", "invalid_value"
        )
    stop_ids = set(body.stop_token_ids or ())
    check_token_ids(sorted(stop_ids), limits.vocab_size, "stop_token_ids")
    check_token_ids(body.allowed_token_ids or (), limits.vocab_size, "allowed_token_ids")
    words = bad_words(body.bad_words or (), tokenizer)
    stops = sorted(stop_ids | (set() if body.ignore_eos else limits.eos_token_ids))
    grammar = grammar or grammar_of(body)
    check_tokens_left(body, words, () if grammar else stops, limits.vocab_size)
    speculative = body.speculative
    of_prompt = [n for n in (body.prompt_logprobs, echo_logprobs) if n is not None]
    return SamplingParams(
        seed=seeds.getrandbits(63) if body.seed is None else body.seed & INT64,
        max_tokens=0,
        has_own_seed=body.seed is not None,
        temperature=temperature_of(body),
        top_p=_or(body.top_p, 1.0),
        top_k=max(body.top_k or 0, 0),
        min_p=_or(body.min_p, 0.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, 1.0),
        logit_bias=logit_bias(body.logit_bias, limits.vocab_size),
        allowed_token_ids=body.allowed_token_ids,
        bad_words_token_ids=words,
        min_tokens=body.min_tokens or 0,
        stop_token_ids=stops,
        logprobs=logprobs,
        prompt_logprobs=max(of_prompt, default=None),
        grammar=grammar,
        speculative_enabled=speculative is None or speculative.enabled is not False,
        speculative_max_tokens=None if speculative is None else speculative.max_tokens,
        prediction_token_ids=prediction(body, limits, tokenizer),
        report_drafts=body.wants_steps,
    )


def temperature_of(body: GenerationBody) -> float:
    """The temperature: 1 if none is stated, and 0 for one so low that logits divided by it would
    overflow, though the largest logit would have all of the probability."""
    stated = _or(body.temperature, 1.0)
    return 0.0 if stated < MIN_TEMPERATURE else stated


def check_tokens_left(
    body: GenerationBody,
    words: Sequence[Sequence[int]],
    stops: Sequence[int],
    vocab_size: int,
) -> None:
    """Raise InvalidRequest if the options allow no first token.

    words: the tokens of bad words; stops: what may not come before `min_tokens`, without a grammar.
    The engine finds later positions, and grammars, that leave no token.
    """
    forbidden = {word[0] for word in words if len(word) == 1}
    if body.min_tokens:
        forbidden.update(stops)
    allowed = body.allowed_token_ids
    if allowed is None:
        is_left = len(forbidden) < vocab_size or any(i not in forbidden for i in range(vocab_size))
    else:
        is_left = not forbidden.issuperset(allowed)
    if not is_left:
        param = "bad_words" if allowed is None else "allowed_token_ids"
        raise InvalidRequest(
            f"Invalid value for '{param}': no token may come first, because 'bad_words' and the "
            "stop tokens, which 'min_tokens' keeps away, include every allowed token.",
            param,
            "invalid_value",
        )


def check_logprobs(body: GenerationBody, logprobs: int | None, limit: int) -> None:
    """Raise InvalidRequest for more alternatives than `limit`, or prompt_logprobs in a stream."""
    name = "top_logprobs" if hasattr(body, "top_logprobs") else "logprobs"
    for value, param in ((logprobs, name), (body.prompt_logprobs, "prompt_logprobs")):
        if value is not None and value > limit:
            raise InvalidRequest(
                f"Invalid value for '{param}': the maximum is {limit}, got {value}.",
                param,
                "invalid_value",
            )
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest(
            "'prompt_logprobs' is not available with 'stream'.", "prompt_logprobs", "invalid_value"
        )


def check_prompt_logprobs(
    params: SamplingParams, num_tokens: int, limits: ModelLimits, param: str = "prompt_logprobs"
) -> None:
    """Raise InvalidRequest if a reply would have too many log probabilities of prompt tokens.

    `num_tokens` is the number of prompt tokens in the reply, counting each choice's copy.
    """
    top = params.prompt_logprobs
    if top is None:
        return
    count = num_tokens * (min(top, limits.vocab_size) + 1)
    if count > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"The reply would contain {count} log probabilities: {num_tokens} prompt tokens, each "
            f"with {top} alternatives and its own. The maximum is {MAX_PROMPT_LOGPROBS}: ask for "
            "fewer alternatives or send a shorter prompt.",
            param,
            "invalid_value",
        )


def check_stops(body: GenerationBody) -> None:
    """Raise InvalidRequest for too many stop strings, or stream_options without stream."""
    if len(body.stops) > MAX_STOPS:
        raise InvalidRequest(
            f"Invalid value for 'stop': at most {MAX_STOPS} strings are allowed.",
            "stop",
            "invalid_value",
        )
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest(
            "'stream_options' is only allowed when 'stream' is true.",
            "stream_options",
            "invalid_value",
        )


def check_steps(body: GenerationBody) -> None:
    """Raise InvalidRequest if steps are asked of a whole reply, or with stop strings.

    The text of a step could hold what a stop string removes from the reply.
    """
    if body.wants_steps and (body.stops or not body.stream):
        raise InvalidRequest(
            "'speculative.steps' is only allowed when 'stream' is true and 'stop' is empty.",
            "speculative",
            "invalid_value",
        )


def check_token_ids(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise InvalidRequest if an id is outside the vocabulary."""
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise InvalidRequest(
            f"Invalid value for '{param}': {wrong} is not a valid token id "
            f"(the vocabulary has {vocab_size} tokens).",
            param,
            "invalid_value",
        )


def logit_bias(given: dict[str, float] | None, vocab_size: int) -> dict[int, float]:
    """Convert OpenAI's map from token ids (as strings) to biases in -100 … 100."""
    bias: dict[int, float] = {}
    for key, value in (given or {}).items():
        # isdecimal alone would let "٣" and a million digits through, and "07" would be a second 7.
        is_id = key.isascii() and key.isdecimal() and len(key) < 10 and str(int(key)) == key
        if not (is_id and int(key) < vocab_size):
            raise InvalidRequest(
                f"Invalid value for 'logit_bias': {key[:40]!r} is not a valid token id "
                f"(the vocabulary has {vocab_size} tokens).",
                "logit_bias",
                "invalid_value",
            )
        if not -100 <= value <= 100:
            raise InvalidRequest(
                f"Invalid value for 'logit_bias': the bias of {key} must be between -100 and 100.",
                "logit_bias",
                "invalid_value",
            )
        bias[int(key)] = value
    return bias


def bad_words(words: Sequence[str], tokenizer: Tokenizer) -> list[list[int]]:
    """The token sequences of each word, with and without a leading space."""
    spellings = [each for word in words for each in (word, " " + word.lstrip())]
    if not spellings:
        return []
    found = tokenizer.encode_batch(spellings, add_special_tokens=False)
    ids = [list(each) for each in dict.fromkeys(map(tuple, found)) if each]
    if (count := sum(map(len, ids))) > MAX_BAD_WORD_TOKENS:
        raise InvalidRequest(
            f"Invalid value for 'bad_words': the words have {count} tokens, counted with and "
            f"without a leading space; the maximum is {MAX_BAD_WORD_TOKENS}.",
            "bad_words",
            "invalid_value",
        )
    return ids


def prediction(body: GenerationBody, limits: ModelLimits, tokenizer: Tokenizer) -> list[int]:
    """The token ids of `prediction`, at most the model's context length."""
    if body.prediction is None:
        return []
    text = content_text(body.prediction.content)[: _PREDICTED_CHARACTERS * limits.max_model_len]
    return tokenizer.encode(text, add_special_tokens=False)[: limits.max_model_len]


def with_max_tokens(params: SamplingParams, max_tokens: int, child: int = 0) -> SamplingParams:
    """The parameters of choice number `child` of a prompt.

    Only choice 0 computes the prompt's log probabilities. Raises InvalidRequest if min_tokens is
    more than `max_tokens`.
    """
    if params.min_tokens > max_tokens:
        raise InvalidRequest(
            f"Invalid value for 'min_tokens': {params.min_tokens} is more than the "
            f"{max_tokens} tokens that may be generated.",
            "min_tokens",
            "invalid_value",
        )
    return msgspec.structs.replace(
        params,
        max_tokens=max_tokens,
        seed=(params.seed + child) & INT64,
        prompt_logprobs=params.prompt_logprobs if child == 0 else None,
    )


def _or(value: float | None, default: float) -> float:
    return default if value is None else float(value)
