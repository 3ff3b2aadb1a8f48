"""Lets the target write the text that its drafter learns from: replies to prompts, and prompts too.

Replies are appended to a file as they end, so that a run which was cut goes on behind them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...speculators.training.dataset import TrainingSequence
from ..engine.engine import Engine
from ..errors import RunnerError
from ..messages import AbortRequests, AddRequest, RequestOutput, SamplingParams


@dataclass(frozen=True)
class TrainingPrompt:
    """A prompt in token space."""

    token_ids: tuple[int, ...]
    domain: str = ""
    is_heldout: bool = False


@dataclass(frozen=True)
class ReplyOptions:
    """How the target replies."""

    max_tokens: int
    temperatures: tuple[float, ...]  # prompt i takes the i-th, round and round
    stop_token_ids: tuple[int, ...]
    seed: int
    max_sequence: int  # prompt and reply together


def sampling(options: ReplyOptions, index: int, prompt: TrainingPrompt) -> SamplingParams:
    """Held-out replies are greedy: along those, drafts are judged as at temperature 0."""
    temperature = options.temperatures[index % len(options.temperatures)]
    return SamplingParams(
        seed=options.seed * 1_000_003 + index,
        max_tokens=min(options.max_tokens, options.max_sequence - len(prompt.token_ids)),
        temperature=0.0 if prompt.is_heldout else temperature,
        stop_token_ids=list(options.stop_token_ids),
    )


def run_requests(
    engine: Engine,
    requests: Sequence[AddRequest],
    window: int,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[str, list[int], str]]:
    """Run `requests`, at most `window` at a time; (id, reply, finish reason) as each one ends.

    RunnerError if one fails. Once `should_stop` says so, no more are begun and those that run are
    forgotten.
    """
    waiting = iter(requests)
    replies: dict[str, list[int]] = {}
    running = 0
    while True:
        if should_stop():
            engine.handle([AbortRequests(list(replies))])
            while engine.has_work():
                engine.step()
            return
        while running < window and (request := next(waiting, None)) is not None:
            replies[request.request_id] = []
            engine.handle([request])
            running += 1
        if not running:
            return
        for step in engine.step():
            for output in step.outputs:
                reply = _collect(output, replies)
                if output.finish_reason is not None:
                    running -= 1
                    del replies[output.request_id]
                    yield output.request_id, reply, output.finish_reason


def _collect(output: RequestOutput, replies: dict[str, list[int]]) -> list[int]:
    if output.error is not None:
        raise RunnerError(f"the target failed on prompt {output.request_id}: {output.error}")
    reply = replies[output.request_id]
    reply.extend(output.token_ids)
    return reply


def invent_prompts(
    engine: Engine,
    prefix: Sequence[int],
    suffix: Sequence[int],
    count: int,
    options: ReplyOptions,
    forbidden: frozenset[int],
    window: int,
) -> Iterator[TrainingPrompt]:
    """Prompts that the target makes up itself, as what it takes for a user's turn.

    `prefix` is all that stands before a user's words in a chat, `suffix` what stands behind them.
    Turns that do not end by themselves, repeat another or hold control tokens are left out.
    """
    seen: set[tuple[int, ...]] = set()
    requests = [
        AddRequest(
            f"invented-{index}",
            list(prefix),
            SamplingParams(
                seed=options.seed * 1_000_003 + index,
                max_tokens=128,
                temperature=1.0,
                top_p=0.95,
                stop_token_ids=list(options.stop_token_ids),
            ),
        )
        for index in range(count)
    ]
    for _, reply, finish_reason in run_requests(engine, requests, window):
        words = tuple(reply[:-1])
        if finish_reason != "stop" or len(words) < 4 or words in seen or forbidden & set(words):
            continue
        seen.add(words)
        yield TrainingPrompt((*prefix, *words, *suffix), "invented")


class ReplyFile:
    """Sequences that are there already, by the number of their prompt."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.sequences: dict[int, TrainingSequence] = {}
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                number, prompt_length, domain, ids = json.loads(line)
            except ValueError:
                break  # the last line of a run that was cut
            self.sequences[number] = TrainingSequence(tuple(ids), prompt_length, domain)
        if path.exists():  # without a torn line, so that the next one begins on its own
            path.write_text("".join(_line(n, s) for n, s in self.sequences.items()))

    def add(self, number: int, sequence: TrainingSequence) -> None:
        """Keep a finished one."""
        self.sequences[number] = sequence
        with self._path.open("a") as file:
            file.write(_line(number, sequence))


def _line(number: int, sequence: TrainingSequence) -> str:
    fields = [number, sequence.prompt_length, sequence.domain, list(sequence.token_ids)]
    return json.dumps(fields) + "\n"


def write_replies(
    engine: Engine,
    prompts: Sequence[TrainingPrompt],
    options: ReplyOptions,
    file: ReplyFile,
    window: int,
    on_reply: Callable[[int], None],
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Fill `file` with the replies to those prompts that have none; `on_reply` hears their length.

    Held-out prompts come first, so that a run with a time limit has them all.
    """
    todo = [i for i in range(len(prompts)) if i not in file.sequences]
    todo.sort(key=lambda i: not prompts[i].is_heldout)
    requests = [
        AddRequest(str(i), list(prompts[i].token_ids), sampling(options, i, prompts[i]))
        for i in todo
        if len(prompts[i].token_ids) + 2 < options.max_sequence
    ]
    for name, reply, _ in run_requests(engine, requests, window, should_stop):
        prompt = prompts[int(name)]
        sequence = TrainingSequence(
            (*prompt.token_ids, *reply), len(prompt.token_ids), prompt.domain
        )
        file.add(int(name), sequence)
        on_reply(len(reply))
