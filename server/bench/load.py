"""Makes the requests of `slipstream bench serve` and the times at which they are sent."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...configs.options import ConfigError

# Median and sigma of two log-normal distributions with long tails and means near 220 and 200
# tokens. They imitate the lengths of ShareGPT's first turns, not the text.
_INPUT, _OUTPUT = (110.0, 1.2), (145.0, 0.8)
# Lengths of the dataset mixed, in tokens: a long prompt, its reply, and the shared system prompt.
_LONG_TOKENS, _LONG_REPLY, _SHARED_TOKENS = 3000, 64, 2000
_FIRST_ID, _NUM_IDS = 1000, 9000  # a range of ids that are plain tokens in common vocabularies
_WORDS = ("river", "stone", "paper", "window", "garden", "silver", "morning", "letter", "harbour")


@dataclass(frozen=True)
class BenchRequest:
    """One request: its prompt (a text, token ids or messages), and the tokens to generate."""

    prompt: str | list[int] | list[dict[str, Any]]
    output_len: int


def random_requests(
    count: int, input_len: int, output_len: int, ratio: float, chat: bool, seed: int
) -> list[BenchRequest]:
    """Requests of random token ids, or for `chat` of random words, about as many as tokens.

    Lengths are uniform between (1 - ratio) and (1 + ratio) times the given ones."""
    draw = random.Random(seed)

    def near(length: int) -> int:
        low, high = math.ceil(length * (1 - ratio)), math.floor(length * (1 + ratio))
        return max(1, draw.randint(low, high))

    return [
        BenchRequest(_prompt(draw, near(input_len), chat), near(output_len)) for _ in range(count)
    ]


def lognormal_requests(count: int, most: int, chat: bool, seed: int) -> list[BenchRequest]:
    """Requests of random text with lengths distributed like ShareGPT's.

    Prompts and replies have at least 4 and at most `most` tokens each."""
    draw = random.Random(seed)

    def length(median: float, sigma: float) -> int:
        return max(4, min(most, round(draw.lognormvariate(math.log(median), sigma))))

    return [
        BenchRequest(_prompt(draw, length(*_INPUT), chat), length(*_OUTPUT)) for _ in range(count)
    ]


def mixed_requests(count: int, most: int, chat: bool, seed: int) -> list[BenchRequest]:
    """Requests of three kinds in random order.

    Half are chats as in `lognormal_requests`, a quarter long prompts with short replies, and a
    quarter chats with the same long system prompt."""
    draw = random.Random(seed)
    chats = iter(lognormal_requests(count, most, chat, seed + 1))
    shared = _prompt(draw, _SHARED_TOKENS, chat)
    requests = []
    for kind in draw.choices(("chat", "long", "shared"), weights=(2, 1, 1), k=count):
        request = next(chats)
        if kind == "long":
            request = BenchRequest(_prompt(draw, _LONG_TOKENS, chat), _LONG_REPLY)
        elif kind == "shared":
            request = BenchRequest(_joined(shared, request.prompt), request.output_len)
        requests.append(request)
    return requests


def _joined(shared: Any, prompt: Any) -> Any:
    return f"{shared} {prompt}" if isinstance(shared, str) else shared + prompt


def _prompt(draw: random.Random, length: int, chat: bool) -> str | list[int]:
    if chat:
        return " ".join(draw.choice(_WORDS) for _ in range(length))
    return [_FIRST_ID + draw.randrange(_NUM_IDS) for _ in range(length)]


def sharegpt_requests(
    path: Path, count: int, num_tokens: Callable[[str], int], most: int, seed: int
) -> list[BenchRequest]:
    """The first question of each conversation in ShareGPT's JSON, with its answer's length.

    Conversations with a question or answer above `most` tokens, or an answer below 4, are skipped.
    Raises ConfigError if the file is unreadable or nothing is left."""
    requests = []
    for entry in _read(path, json.loads):
        turns = entry.get("conversations") or entry.get("conversation") or []
        if len(turns) < 2:
            continue
        question, answer = (str(turn.get("value", "")) for turn in turns[:2])
        length = num_tokens(answer)
        if question and 4 <= length <= most and num_tokens(question) <= most:
            requests.append(BenchRequest(question, length))
    return _drawn(requests, count, path, seed)


def jsonl_requests(path: Path, count: int, output_len: int, seed: int) -> list[BenchRequest]:
    """Requests from JSON lines with `prompt` or `messages`, and an optional `output_len`.

    `output_tokens` is accepted for `output_len`; the argument is the default. Raises ConfigError
    for an unreadable file or a line without a prompt."""
    requests = []
    for entry in _read(path, lambda text: [json.loads(t) for t in text.splitlines() if t.strip()]):
        prompt = entry.get("prompt", entry.get("messages"))
        if not prompt:
            raise ConfigError(f"{path}: each line needs 'prompt' or 'messages'")
        requests.append(
            BenchRequest(prompt, entry.get("output_len") or entry.get("output_tokens", output_len))
        )
    return _drawn(requests, count, path, seed)


def _read(path: Path, parse: Callable[[str], Any]) -> list[dict[str, Any]]:
    try:
        entries = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read --dataset-path {path}: {(error.strerror or '').lower()}"
        ) from None
    except ValueError as error:
        raise ConfigError(f"--dataset-path {path} is not JSON: {error}") from None
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise ConfigError(f"--dataset-path {path} must contain a list of JSON objects")
    return entries


def _drawn(requests: list[BenchRequest], count: int, path: Path, seed: int) -> list[BenchRequest]:
    """`count` requests in random order; if there are too few, the same order repeats."""
    if not requests:
        raise ConfigError(f"--dataset-path {path} contains no usable prompt")
    random.Random(seed).shuffle(requests)
    return [requests[place % len(requests)] for place in range(count)]


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Seconds from the start at which each request is due; all are 0 for an infinite rate.

    Gaps follow a gamma distribution with mean 1 / rate and shape `burstiness`: 1 is a Poisson
    process, less than 1 comes in bursts, more than 1 is more even.
    """
    draw, due = random.Random(seed), 0.0
    for _ in range(count):
        yield due
        if math.isfinite(rate):
            due += draw.gammavariate(burstiness, 1 / (rate * burstiness))
