"""The requests of `slipstream bench serve`: what is asked, and when."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...configs.options import ConfigError

# Two log-normal distributions (median, sigma) with means near 220 and 200 tokens and long tails:
# an imitation of the lengths of ShareGPT's first turns, not their text.
_INPUT, _OUTPUT = (110.0, 1.2), (145.0, 0.8)
_FIRST_ID, _NUM_IDS = 1000, 9000  # plain tokens in every usual vocabulary
_WORDS = ("river", "stone", "paper", "window", "garden", "silver", "morning", "letter", "harbour")


@dataclass(frozen=True)
class Ask:
    """One request: a text, token ids or messages, and how much is to be generated."""

    prompt: str | list[int] | list[dict[str, Any]]
    output_len: int


def random_asks(
    count: int, input_len: int, output_len: int, ratio: float, chat: bool, seed: int
) -> list[Ask]:
    """Random ids (for chat: about as many random words); lengths vary by `ratio` both ways."""
    draw = random.Random(seed)

    def near(length: int) -> int:
        low, high = math.ceil(length * (1 - ratio)), math.floor(length * (1 + ratio))
        return max(1, draw.randint(low, high))

    return [Ask(_prompt(draw, near(input_len), chat), near(output_len)) for _ in range(count)]


def lognormal_asks(count: int, most: int, chat: bool, seed: int) -> list[Ask]:
    """Lengths like ShareGPT's, at most `most` tokens each way; the text is random."""
    draw = random.Random(seed)

    def length(median: float, sigma: float) -> int:
        return max(4, min(most, round(draw.lognormvariate(math.log(median), sigma))))

    return [Ask(_prompt(draw, length(*_INPUT), chat), length(*_OUTPUT)) for _ in range(count)]


def _prompt(draw: random.Random, length: int, chat: bool) -> str | list[int]:
    if chat:
        return " ".join(draw.choice(_WORDS) for _ in range(length))
    return [_FIRST_ID + draw.randrange(_NUM_IDS) for _ in range(length)]


def sharegpt_asks(
    path: Path, count: int, num_tokens: Callable[[str], int], most: int, seed: int
) -> list[Ask]:
    """First question and length of the first answer of conversations in ShareGPT's JSON."""
    asks = []
    for entry in _read(path, json.loads):
        turns = entry.get("conversations") or entry.get("conversation") or []
        if len(turns) < 2:
            continue
        question, answer = (str(turn.get("value", "")) for turn in turns[:2])
        length = num_tokens(answer)
        if question and 4 <= length <= most and num_tokens(question) <= most:
            asks.append(Ask(question, length))
    return _drawn(asks, count, path, seed)


def jsonl_asks(path: Path, count: int, output_len: int, seed: int) -> list[Ask]:
    """Lines with `prompt` or `messages`, and perhaps `output_len` (or `output_tokens`)."""
    asks = []
    for entry in _read(path, lambda text: [json.loads(t) for t in text.splitlines() if t.strip()]):
        prompt = entry.get("prompt", entry.get("messages"))
        if not prompt:
            raise ConfigError(f"{path}: each line needs 'prompt' or 'messages'")
        asks.append(Ask(prompt, entry.get("output_len") or entry.get("output_tokens", output_len)))
    return _drawn(asks, count, path, seed)


def _read(path: Path, parse: Callable[[str], Any]) -> list[dict[str, Any]]:
    try:
        entries = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--dataset-path {path}: {(error.strerror or '').lower()}") from None
    except ValueError as error:
        raise ConfigError(f"--dataset-path {path} is not JSON: {error}") from None
    if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
        raise ConfigError(f"--dataset-path {path} must hold a list of objects")
    return entries


def _drawn(asks: list[Ask], count: int, path: Path, seed: int) -> list[Ask]:
    """`count` of them in random order; again from the beginning if there are too few."""
    if not asks:
        raise ConfigError(f"--dataset-path {path} holds no usable prompt")
    random.Random(seed).shuffle(asks)
    return [asks[place % len(asks)] for place in range(count)]


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> Iterator[float]:
    """Seconds from the start at which each request is due; all at once for an infinite rate.

    Gaps are gamma distributed with mean 1 / rate and shape `burstiness`: 1 is a Poisson process,
    less comes in bursts, more is more even.
    """
    draw, due = random.Random(seed), 0.0
    for _ in range(count):
        yield due
        if math.isfinite(rate):
            due += draw.gammavariate(burstiness, 1 / (rate * burstiness))
