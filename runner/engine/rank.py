"""The process of a rank other than the first: it runs the steps that the first rank tells it to.

It has no scheduler, no requests and no channel to the server. It ends with the first rank, however
that ends.
"""

from __future__ import annotations

import faulthandler
import logging
import sys
import time
from collections import deque
from functools import partial
from typing import Any

import torch

from ...configs.logs import configure_logging
from ..errors import RunnerError
from ..graphs.capture import spare_modules
from ..parallel.commands import (
    NAMES,
    Command,
    Do,
    DrafterLoaded,
    DropDrafter,
    Execute,
    FillTokens,
    Forward,
    LoadDrafter,
    RankFault,
    Sample,
    StepDigest,
    SwapDrafter,
    command_decoder,
    digest_of,
    plan_digest,
    unpacked_mask,
)
from ..parallel.group import RankEnd
from ..parallel.rank_processes import Host
from ..parallel.small_sums import GiveUp
from ..process import WorkerOrders, end_now, receive_orders
from ..scheduling.plan import StepPlan
from ..startup.assembly import assemble
from ..startup.compile_ahead import start_ahead
from ..step.model_runner import ModelRunner
from .rank_drafters import RankDrafter
from .tensor_parallel import join_ranks
from .worker import OTHER_ENGINES_SECONDS, sentence, tune_garbage_collector

log = logging.getLogger("slipstream.rank")
_POLL_SECONDS = 0.001  # while results are due
_LOADING_POLL_SECONDS = 0.02  # while a drafter is loaded


class Follower:
    """Runs commands in order; at most `max_in_flight` steps have results to come."""

    def __init__(self, runner: ModelRunner, end: RankEnd, rank: int, max_in_flight: int) -> None:
        self._runner, self._end, self._rank = runner, end, rank
        self._max_in_flight = max_in_flight
        self._in_flight: deque[tuple[int, int, Any]] = deque()  # step id, digest of the plan
        self._forwarded: StepPlan | None = None
        self._drafter = RankDrafter(runner.speculator, runner.exchange_drafter)

    def run(self) -> None:
        """Serve until `Stop` arrives."""
        while True:
            idle = _LOADING_POLL_SECONDS if self._drafter.is_loading else None
            packet = self._end.receive(_POLL_SECONDS if self._in_flight else idle)
            if (loaded := self._drafter.finished()) is not None:
                self._end.answer(DrafterLoaded(self._rank, *loaded))
            if packet is None:
                self._land_finished()
                continue
            command = command_decoder.decode(packet)
            if not self._do(command):
                break
        while self._in_flight:
            self._land()

    def _do(self, command: Command) -> bool:
        """Run a command; False for `Stop`."""
        runner = self._runner
        match command:
            case Execute(plan):
                self._make_room()
                self._launched(plan, runner.execute(plan))
            case Forward(plan):
                self._make_room()
                runner.forward(plan)
                self._forwarded = plan
            case Sample():
                step, self._forwarded = self._forwarded, None
                assert step is not None, "a step must be forwarded before it samples"
                self._launched(step, runner.sample(step, unpacked_mask(command)))
            case FillTokens(num_slots, num_drafts):
                runner.fill_tokens(num_slots, num_drafts)
            case Do(name):
                assert name in NAMES
                getattr(runner, name)()
                if name == "capture":
                    tune_garbage_collector()
            case LoadDrafter(number, model):
                self._drafter.load(number, model)
            case SwapDrafter():
                self._drafter.swap()
            case DropDrafter():
                self._drafter.drop()
            case _:
                return False
        return True

    def _launched(self, plan: StepPlan, handle: Any) -> None:
        self._in_flight.append((plan.step_id, plan_digest(plan), handle))

    def _make_room(self) -> None:
        """Wait for results, since no more steps may be in flight than the first rank has."""
        while len(self._in_flight) >= self._max_in_flight:
            self._land()

    def _land_finished(self) -> None:
        while self._in_flight and self._in_flight[0][2].is_ready():
            self._land()

    def _land(self) -> None:
        step_id, plan, handle = self._in_flight.popleft()
        self._end.answer(StepDigest(self._rank, step_id, digest_of(handle.get(), plan)))


def serve(orders: WorkerOrders) -> int:
    """Build this rank's model runner and follow the first rank; returns the exit status."""
    config, rank = orders.config, orders.rank
    end = RankEnd(orders)
    try:
        runner = _build(orders, partial(_give_up, end, rank))
        in_flight = 2 if config.scheduler.async_scheduling else 1
        Follower(runner, end, rank, in_flight).run()
        status = 0
    except Exception as error:
        expected = isinstance(error, (RunnerError, OSError, ImportError))
        level = logging.DEBUG if expected else logging.ERROR
        if orders.engines is not None:
            time.sleep(OTHER_ENGINES_SECONDS)  # another engine may be the cause
        log.log(level, "rank %d ends", rank, exc_info=True)
        end.answer(RankFault(rank, f"tensor-parallel rank {rank} ended: {sentence(error)}"))
        status = 1
    end.close()
    return status


def _give_up(end: RankEnd, rank: int, sentence: str) -> None:
    """End this process, whose main thread waits in vain for another rank."""
    end.answer(RankFault(rank, f"tensor-parallel rank {rank} ended: {sentence}"))
    end.close()
    end_now(1)


def _build(orders: WorkerOrders, give_up: GiveUp) -> ModelRunner:
    config, hosted = orders.config, orders.hosted
    host = None if hosted is None else Host(hosted.address)
    with start_ahead(config) as ahead:
        if torch.cuda.is_available():
            spare_modules()
        groups = join_ranks(
            config, orders.rank, orders.rendezvous, host, orders.engines, give_up=give_up
        )
        return ModelRunner(assemble(config, lambda progress: None, ahead, *groups))


def main() -> int:
    """Entry point of `python -m slipstream.runner.engine.rank`; reads its orders from stdin."""
    faulthandler.enable()
    orders = receive_orders(sys.stdin.buffer)
    server = orders.config.server
    # The first rank logs what all ranks do.
    level = "debug" if server.log_level == "debug" else "warning"
    configure_logging(level, server.log_format, orders.log_name or f"rank {orders.rank}")
    return serve(orders)


if __name__ == "__main__":
    end_now(main())  # communicators that other ranks have left may never finish
