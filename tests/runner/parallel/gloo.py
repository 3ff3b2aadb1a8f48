"""Ranks as threads of one process that exchange tensors through gloo, as processes do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import ProcessGroup

from slipstream.runner.parallel.collectives import Collectives

_TIMEOUT = timedelta(seconds=30)


def _group(store: dist.Store, rank: int, size: int) -> ProcessGroup:
    """A process group that is none of the process's own, of which it has only one rank."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._devices, options._timeout = [gloo.create_device(hostname="127.0.0.1")], _TIMEOUT
    group: Any = ProcessGroup(store, rank, size)
    kind = ProcessGroup.BackendType.GLOO
    group._set_default_backend(kind)
    group._register_backend(torch.device("cpu"), kind, gloo(store, rank, size, options))
    return group


def on_gloo(members: Sequence[Sequence[int]], work: Callable[[int, Collectives], Any]) -> list[Any]:
    """The results of `work` on each rank: its number and the collectives of its members."""
    store = dist.HashStore()

    def run(rank: int) -> Any:
        (own,) = [ranks for ranks in members if rank in ranks]
        prefix = dist.PrefixStore(str(own), store)
        group = _group(prefix, own.index(rank), len(own))
        return work(rank, Collectives(len(own), torch.device("cpu"), group))

    total = sum(map(len, members))
    with ThreadPoolExecutor(total) as pool:
        return [future.result() for future in [pool.submit(run, rank) for rank in range(total)]]
