"""A whole engine whose ranks are threads of this process; commands and answers cross as bytes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from slipstream.configs.schema import Config
from slipstream.runner.engine.engine import Engine, join
from slipstream.runner.engine.rank import Follower
from slipstream.runner.engine.tensor_parallel import LeadingRunner
from slipstream.runner.parallel.commands import (
    Answer,
    Command,
    Digests,
    answer_decoder,
    command_decoder,
    encoder,
)
from slipstream.runner.parallel.group import RankGroup
from slipstream.runner.parallel.ranks import Ranks
from slipstream.runner.startup.assembly import assemble
from slipstream.runner.startup.build import build_model_runner
from slipstream.runner.step.model_runner import ModelRunner

from .threads import Meeting, ThreadCommunicator


class ThreadGroup(RankGroup):
    """Stands for the processes; keeps every command that was sent."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent: list[Command] = []
        self.num_answers = 0
        self._failure: str | None = None
        self._digests = Digests(size)
        self._queues: list[queue.SimpleQueue[bytes]] = [queue.SimpleQueue() for _ in range(size)]
        self.threads: list[threading.Thread] = []

    def send(self, command: Command) -> None:
        packet = encoder.encode(command)
        self.sent.append(command_decoder.decode(packet))
        for one in self._queues[1:]:
            one.put(packet)

    def receive(self, rank: int, timeout: float | None) -> bytes | None:
        try:
            return self._queues[rank].get(timeout=timeout)
        except queue.Empty:
            return None

    def answer(self, answer: Answer) -> None:
        self.num_answers += 1
        self._take(answer_decoder.decode(encoder.encode(answer)))

    def shutdown(self) -> None:
        from slipstream.runner.parallel.commands import Stop

        self.send(Stop())
        for thread in self.threads:
            thread.join(10)


class _End:
    def __init__(self, group: ThreadGroup, rank: int) -> None:
        self._group, self._rank = group, rank

    def receive(self, timeout: float | None) -> bytes | None:
        return self._group.receive(self._rank, timeout)

    def answer(self, answer: Answer) -> None:
        self._group.answer(answer)


def build_on_threads(
    groups: list[ThreadGroup],
    config: Config,
    tell: Any,
    size: int = 2,
    communicator: type[ThreadCommunicator] = ThreadCommunicator,
    adapt: Callable[[ModelRunner], None] = lambda runner: None,
) -> Engine:
    """As `engine.build_engine`; adds the group to `groups`. `adapt` changes each rank's runner."""
    meeting, group = Meeting(size), ThreadGroup(size)
    groups.append(group)

    def follow(rank: int) -> None:
        try:
            ranks = Ranks(rank, size, communicator(rank, meeting))
            runner = ModelRunner(assemble(config, lambda _: None, None, ranks))
            adapt(runner)
            Follower(runner, _End(group, rank), rank, 2).run()  # type: ignore[arg-type]
            runner.shutdown()
        except BaseException:
            meeting.leave()
            raise

    for rank in range(1, size):
        group.threads.append(threading.Thread(target=follow, args=(rank,), daemon=True))
        group.threads[-1].start()
    ranks = Ranks(0, size, communicator(0, meeting))
    create = partial(LeadingRunner, group=group, ranks=ranks)
    leader = build_model_runner(config, tell, None, ranks, create)
    adapt(leader)
    return join(leader, config)
