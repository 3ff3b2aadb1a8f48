"""The first rank of a group that shares a model: it runs each step, and tells the others to.

A rank's step is the same code as on one device. What is added is one message a step, and after it
one answer of each rank, which nothing waits for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from ...configs.schema import Config
from ..batch.step_output import StepHandle
from ..errors import RunnerError
from ..messages import Progress
from ..parallel.collectives import Collectives, meet, subgroup
from ..parallel.commands import (
    Do,
    Execute,
    FillTokens,
    Forward,
    digest_of,
    packed_mask,
    plan_digest,
)
from ..parallel.engine_group import Calls, EngineGroup
from ..parallel.experts import ExpertRanks, RowExchange
from ..parallel.group import RankGroup
from ..parallel.rank_processes import Host, Rendezvous
from ..parallel.ranks import Ranks
from ..parallel.small_sums import GiveUp
from ..process import EngineOrders
from ..scheduling.plan import RowResult, StepPlan
from ..startup.build import build_model_runner
from ..startup.compile_ahead import CompileAhead
from ..step.device_queue import choose_device
from ..step.model_runner import ModelRunner
from ..step.parts import RunnerParts
from .rank_drafters import DraftersElsewhere

_POLL_SECONDS = 0.05  # how often a wait for results looks after the other ranks


def join_ranks(
    config: Config,
    rank: int,
    rendezvous: str,
    host: Host | None = None,
    orders: EngineOrders | None = None,
    calls: Calls | None = None,
    give_up: GiveUp | None = None,
) -> tuple[Ranks | None, EngineGroup | None]:
    """Take the device of a rank and join its groups; returns when all ranks have joined.

    The groups are the ranks of its model, if there are several, and the engines that share the
    experts, if there are `orders`. `host` is this process's if the ranks are on several hosts;
    `calls` are those of an engine's first rank; `give_up` ends this process, with a sentence for
    the server, if its GPU waits in vain for another one.
    """
    size = config.parallel.tensor_parallel_size
    if host is None and choose_device(config.model.device).type == "cuda":
        if torch.cuda.device_count() < size:
            raise RunnerError(
                f"--tensor-parallel-size {size} needs {size} GPUs, but this machine shows "
                f"{torch.cuda.device_count()}"
            )
    device = choose_device(config.model.device)  # the first that this process sees
    if orders is None:
        meet(rank, size, rendezvous, device, host)
        collectives = _sums_of_model(config, device, give_up)
        by_expert = config.parallel.enable_expert_parallel
        return Ranks(rank, size, collectives, by_expert, collectives.packets), None
    own = orders.engine * size + rank
    meet(own, orders.size * size, rendezvous, device, host)
    everyone = range(orders.size * size)
    models = [everyone[start : start + size] for start in everyone[::size]]
    peers = [everyone[start::size] for start in range(size)]  # the same rank of each engine
    of_model = subgroup(models, own) if size > 1 else None
    exchange = RowExchange(
        Collectives(orders.size, device, subgroup(peers, own)),
        orders.size,
        device,
        config.parallel.all2all_backend == "all_to_all",
    )
    numbers = Collectives(orders.size, torch.device("cpu"), subgroup(peers, own, on_host=True))
    experts = ExpertRanks(own, len(everyone), exchange, orders.engine)
    if calls is not None and host is not None:
        calls.meet(numbers.gather_texts(calls.endpoint))
    engines = EngineGroup(orders.engine, orders.size, experts, numbers, calls)
    if size == 1:
        return None, engines
    collectives = _sums_of_model(config, device, give_up, of_model)
    return Ranks(rank, size, collectives, True, collectives.packets), engines


def _sums_of_model(
    config: Config, device: torch.device, give_up: GiveUp | None, group: Any = None
) -> Collectives:
    """The collectives of the ranks that share a model; `group`: theirs, None = all ranks."""
    collectives = Collectives(config.parallel.tensor_parallel_size, device, group)
    if not config.parallel.disable_custom_all_reduce:
        collectives.use_small_sums(give_up)
    return collectives


def build_leader(
    config: Config,
    progress: Callable[[Progress], None],
    ahead: CompileAhead | None,
    group: RankGroup | None,
    orders: EngineOrders | None = None,
    calls: Calls | None = None,
    meeting: Rendezvous | None = None,
) -> ModelRunner:
    """Build the first rank's model runner; `group` holds the others, which build theirs.

    `orders` and `calls`: see `join_ranks`. Without a group only other engines are joined, at
    `meeting`.
    """
    if group is None:
        assert meeting is not None
        _, engines = join_ranks(config, 0, meeting.where, meeting.host, orders, calls)
        return build_model_runner(config, progress, ahead, engines=engines)
    with group.faults():
        where = (group.rendezvous, group.host)
        ranks, engines = join_ranks(config, 0, *where, orders, calls, group.on_hang)
        assert ranks is not None
        create = partial(LeadingRunner, group=group, ranks=ranks)
        return build_model_runner(config, progress, ahead, ranks, create, engines)


class WatchedHandle:
    """A step's results, which are compared with those of the other ranks."""

    def __init__(self, handle: StepHandle, plan: StepPlan, group: RankGroup) -> None:
        self._handle, self._step_id, self._group = handle, plan.step_id, group
        self._plan = plan_digest(plan)
        self._is_noted = False

    def wait(self, timeout: float) -> bool:
        self._group.check()
        return self._handle.wait(timeout)

    def get(self) -> list[RowResult]:
        """As `StepHandle.get`. Raises RankFailed instead of waiting for a rank that is gone."""
        with self._group.faults():
            while not self.wait(_POLL_SECONDS):
                pass
            results = self._handle.get()
        if not self._is_noted:
            self._is_noted = True
            self._group.note(0, self._step_id, digest_of(results, self._plan))
        return results


class LeadingRunner(ModelRunner):
    """The model runner of the first rank. Each call reaches the other ranks in the same order."""

    idle_seconds = 0.2

    def __init__(self, parts: RunnerParts, group: RankGroup, ranks: Ranks) -> None:
        super().__init__(parts)
        self._group, self._ranks = group, ranks
        self._drafters = DraftersElsewhere(group)

    def exchange_drafter(self, swap: Callable[[], None]) -> None:
        self._drafters.swap()
        super().exchange_drafter(swap)

    def load_elsewhere(self, model: str) -> Callable[[], str | None]:
        return self._drafters.load(model)

    def drop_elsewhere(self) -> None:
        self._drafters.drop()

    def check(self) -> None:
        self._group.check()

    def execute(self, plan: StepPlan) -> Any:
        self._group.send(Execute(plan))
        super().forward(plan)
        return self._watched(plan, super().sample(plan))

    def forward(self, plan: StepPlan) -> None:
        self._group.send(Forward(plan))
        super().forward(plan)

    def sample(self, plan: StepPlan, grammar_bitmask: np.ndarray | None = None) -> Any:
        self._group.send(packed_mask(grammar_bitmask))
        return self._watched(plan, super().sample(plan, grammar_bitmask))

    def _watched(self, plan: StepPlan, handle: StepHandle) -> WatchedHandle:
        return WatchedHandle(handle, plan, self._group)

    def fill_tokens(self, num_slots: int, num_drafts: int) -> None:
        self._group.send(FillTokens(num_slots, num_drafts))
        super().fill_tokens(num_slots, num_drafts)

    def warm_up(self) -> None:
        self._group.send(Do("warm_up"))
        super().warm_up()

    def capture(self) -> None:
        self._group.send(Do("capture"))
        super().capture()

    def synchronize(self) -> None:
        self._group.send(Do("synchronize"))
        super().synchronize()

    def abandon(self) -> None:
        self._group.abandon()

    def shutdown(self) -> None:
        super().shutdown()
        self._group.shutdown()
        self._ranks.communicator.close()
