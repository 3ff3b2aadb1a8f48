"""Engines that share their experts as threads of one process, each with the loop of a worker."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from slipstream.configs.schema import Config
from slipstream.runner.engine.engine import Engine, join
from slipstream.runner.engine.lockstep import Lockstep
from slipstream.runner.messages import AddRequest, StepOutputs
from slipstream.runner.parallel.engine_group import Calls, EngineGroup
from slipstream.runner.parallel.experts import ExpertRanks, RowExchange
from slipstream.runner.process import EngineOrders
from slipstream.runner.startup.build import build_model_runner

from ...speculators.tiny_engine import Run
from .threads import Meeting, ThreadCommunicator

_POLL_MS = 20


_COMMUNICATORS: list[Rows] = []


@torch.library.custom_op("slipstream_tests::everyones", mutates_args=())
def _everyones(x: Tensor, communicator: int) -> Tensor:
    """Every rank's x, in an operation that recorded graphs hold."""
    return _COMMUNICATORS[communicator].exchange(x)


class Rows(ThreadCommunicator):
    """The exchange of rows between engines."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        super().__init__(rank, meeting)
        self.num_sorted = 0  # collectives in which ranks send different numbers of rows
        self._number = len(_COMMUNICATORS)
        _COMMUNICATORS.append(self)

    def exchange(self, x: Tensor) -> Tensor:
        self.num_collectives += 1
        return torch.stack(self._meeting.exchange(self._rank, x.clone()))

    def all_gather(self, x: Tensor) -> Tensor:
        found: Tensor = _everyones(x, self._number)
        return found

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.all_gather(x).sum(0)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return self.all_gather(x).sum(0).chunk(self._meeting.size)[self._rank].clone()

    def all_to_all(
        self, x: Tensor, received: Sequence[int] | None = None, sent: Sequence[int] | None = None
    ) -> Tensor:
        if received is None:
            blocks = self.all_gather(x).view(
                self._meeting.size, self._meeting.size, -1, *x.shape[1:]
            )
            return blocks[:, self._rank].reshape(x.shape)
        assert sent is not None
        self.num_sorted += 1
        found = self._meeting.exchange(self._rank, torch.split(x.clone(), list(sent)))
        own = [parts[self._rank] for parts in found]
        assert [len(part) for part in own] == list(received)
        return torch.cat(own)


class EngineThread:
    """One engine. Collectives are counted by kind; `passes` holds the rows of each."""

    def __init__(
        self,
        config: Config,
        folder: Path,
        rank: int,
        meetings: tuple[Meeting, Meeting],
        adapt: Callable[[Engine], None],
    ) -> None:
        self._adapt = adapt
        self._config, self._folder, self.rank = config, folder, rank
        self._meetings = meetings
        self._inbox: queue.SimpleQueue[AddRequest | None] = queue.SimpleQueue()
        self.run = Run()
        self.num_open = 0  # requests
        self.ready = threading.Event()
        self.error: BaseException | None = None
        self.rows = Rows(rank, meetings[0])
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def submit(self, request: AddRequest) -> None:
        self.num_open += 1
        self._inbox.put(request)

    def stop(self) -> None:
        self._inbox.put(None)
        self.thread.join(30)
        assert not self.thread.is_alive()

    def _build(self) -> Engine:
        size = self._config.parallel.data_parallel_size
        is_all_to_all = self._config.parallel.all2all_backend == "all_to_all"
        exchange = RowExchange(self.rows, size, torch.device("cpu"), is_all_to_all)
        experts = ExpertRanks(self.rank, size, exchange, self.rank)
        host = ThreadCommunicator(self.rank, self._meetings[1])
        self.calls = Calls(EngineOrders(self.rank, size, str(self._folder)))
        group = EngineGroup(self.rank, size, experts, host, self.calls)
        self.runner: Any = build_model_runner(self._config, lambda _: None, engines=group)
        self.engine = join(self.runner, self._config, Lockstep(self.runner.sync, self.calls))
        return self.engine

    def _serve(self) -> None:
        try:
            engine = self._build()
            self._adapt(engine)
            self.ready.set()
            while self._handle(engine):
                if engine.has_work():
                    for outputs in engine.step():
                        self._take(outputs)
                else:
                    engine.calls.poll(_POLL_MS)  # type: ignore[union-attr]
            self.runner.synchronize()
            engine.shutdown()
            self.runner.shutdown()
            self.calls.close()
        except BaseException as error:
            self.error = error
            self.calls.close()
            for meeting in self._meetings:
                meeting.leave()
            self.ready.set()

    def _handle(self, engine: Engine) -> bool:
        while not self._inbox.empty():
            request = self._inbox.get()
            if request is None:
                return False
            engine.handle([request])
        return True

    def _take(self, outputs: StepOutputs) -> None:
        self.run.take(outputs)
        self.num_open -= sum(output.finish_reason is not None for output in outputs.outputs)


def start_engines(
    config: Config, folder: Path, adapt: Callable[[Engine], None] = lambda engine: None
) -> list[EngineThread]:
    """As many engines as `-dp` says, ready to serve after `adapt` has changed each."""
    size = config.parallel.data_parallel_size
    meetings = Meeting(size), Meeting(size)
    engines = [EngineThread(config, folder, rank, meetings, adapt) for rank in range(size)]
    for engine in engines:
        engine.ready.wait(60)
    check(engines)
    return engines


def check(engines: list[EngineThread]) -> None:
    """Raise the error of an engine that has ended, the cause first."""
    errors = [engine.error for engine in engines if engine.error is not None]
    real = [error for error in errors if "BrokenBarrier" not in repr(error)]
    if errors:
        raise (real or errors)[0]
