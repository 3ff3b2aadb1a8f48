"""Lets the target write the text that its drafter learns from: replies, and perhaps the prompts.

Each finished reply is appended to a file at once, so that an interrupted run can resume after it.
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
    token_ids: tuple[int, ...]
    domain: str = ""
    is_heldout: bool = False


@dataclass(frozen=True)
class ReplyOptions:
    max_tokens: int
    temperatures: tuple[float, ...]  # prompts use them in turn
    stop_token_ids: tuple[int, ...]
    seed: int
    max_sequence: int  # limit on prompt plus reply, in tokens


def sampling(options: ReplyOptions, index: int, prompt: TrainingPrompt) -> SamplingParams:
    """The sampling parameters for prompt number `index`.

    Held-out replies are greedy, so that they measure acceptance at temperature 0.
    """
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
    """Run `requests`, at most `window` at a time; yield (id, reply, finish reason) as they end.

    Raises RunnerError if one fails. Once `should_stop` returns True, the running ones are aborted
    and no more are started.
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
    """Yield prompts that the target makes up: it completes a user's turn of a chat.

    `prefix` is what precedes a user's words in a chat, and `suffix` what follows them. Turns that
    do not end by themselves, are duplicates or contain control tokens are left out.
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
    """A file of finished sequences, by the number of their prompt."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.sequences: dict[int, TrainingSequence] = {}
        for line in path.read_text().splitlines() if path.exists() else []:
            try:
                number, prompt_length, domain, ids = json.loads(line)
            except ValueError:
                break  # the unfinished last line of an interrupted run
            self.sequences[number] = TrainingSequence(tuple(ids), prompt_length, domain)
        if path.exists():  # drop an unfinished line, so that the next one starts on its own line
            path.write_text("".join(_line(n, s) for n, s in self.sequences.items()))

    def add(self, number: int, sequence: TrainingSequence) -> None:
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
    """Add replies to `file` for the prompts without one; call `on_reply` with each reply's length.

    Held-out prompts come first, so that a run with a time limit completes them.
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
