"""Collectives between processes, by torch.distributed: NCCL between GPUs, gloo between CPUs.

A group of one rank never imports this module.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store, TCPStore

from .packet_sums import PacketSums, open_packet_sums
from .rank_processes import Host
from .small_sums import GiveUp, SmallSums, open_small_sums

# A rank that dies is noticed by its parent at once; this only bounds waits that nothing else ends.
_TIMEOUT = timedelta(hours=2)
_TEXT_BYTES = 128
# Newer versions of torch have other names for them.
_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def meet(
    rank: int, size: int, rendezvous: str, device: torch.device, host: Host | None = None
) -> None:
    """Join the group of all ranks; waits for the others.

    `rendezvous` is the same for all ranks: on one host a file that does not exist before the
    first rank joins, and on several hosts "tcp://", an address and a port, on which a socket of
    the first rank's host listens. `host` is this process's of several.
    """
    on_gpu = device.type == "cuda"
    is_remote = rendezvous.startswith("tcp://")
    if is_remote:
        assert host is not None
        use_interface(host.address)
    else:  # between GPUs, gloo adds up numbers of the host
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        init_method=None if is_remote else f"file://{rendezvous}",
        store=_store(rank, size, rendezvous, host) if is_remote else None,
        rank=rank,
        world_size=size,
        timeout=_TIMEOUT,
        device_id=device if on_gpu else None,
    )


def subgroup(members: Sequence[Sequence[int]], rank: int, on_host: bool = False) -> Any:
    """The process group of those `members` that include `rank`; every rank of all must call it.

    With `on_host` it is for tensors on the host, otherwise for those on the device.
    """
    own: Any = None
    for ranks in members:
        backend = "gloo" if on_host else None
        group = dist.new_group(list(ranks), timeout=_TIMEOUT, backend=backend)
        if rank in ranks:
            own = group
    return own


class Collectives:
    """A `Communicator` over the group that `meet` joined, or over a part of it."""

    def __init__(self, size: int, device: torch.device, group: Any = None) -> None:
        """`group` has `size` members; None: all ranks."""
        self._size, self._device, self._group = size, device, group
        self._small: SmallSums | None = None
        self.packets: PacketSums | None = None

    def use_small_sums(self, give_up: GiveUp | None = None) -> None:
        """Let small sums go through memory that the GPUs share, if they can; see `small_sums`.

        `give_up` ends this process, with a sentence for the server, if the trial of that hangs."""
        group = (self._size, self._device, self.least, self._group, give_up)
        self._small = open_small_sums(*group)
        if self._small is not None:
            self.packets = open_packet_sums(dist.get_rank(self._group), *group)

    def all_reduce(self, x: Tensor) -> Tensor:
        packets = self.packets
        if packets is not None and x.dim() == 2 and packets.fit(x.shape[0], x.shape[1], x.dtype):
            return packets.sum(x, x.dtype)
        if self._small is not None and (out := self._small.sum(x)) is not None:
            return out
        dist.all_reduce(x, group=self._group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        out = x.new_empty(self._size, *x.shape)
        _gather(out.view(self._size * x.shape[0], *x.shape[1:]), x, group=self._group)
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0] // self._size, *x.shape[1:])
        _scatter(out, x, group=self._group)
        return out

    def all_to_all(
        self, x: Tensor, received: Sequence[int] | None = None, sent: Sequence[int] | None = None
    ) -> Tensor:
        rows = x.shape[0] if received is None else sum(received)
        out = x.new_empty(rows, *x.shape[1:])
        blocks = None if received is None else list(received), None if sent is None else list(sent)
        dist.all_to_all_single(out, x, *blocks, group=self._group)
        return out

    def gather_texts(self, text: str) -> list[str]:
        """The short ASCII text of every rank, on the host. Start-up only."""
        row = text.encode("ascii").ljust(_TEXT_BYTES, b"\0")
        assert len(row) == _TEXT_BYTES
        rows = self.all_gather(torch.tensor(list(row), dtype=torch.uint8)).tolist()
        return [bytes(found).rstrip(b"\0").decode("ascii") for found in rows]

    def close(self) -> None:
        """Leave all groups. GPUs leave them when the process ends, as graphs hold their
        collectives."""
        if self._device.type == "cpu" and dist.is_initialized():
            dist.destroy_process_group()

    def least(self, values: Sequence[int]) -> list[int]:
        table = torch.tensor(list(values), dtype=torch.int64, device=self._device)
        dist.all_reduce(table, dist.ReduceOp.MIN, group=self._group)
        found: list[int] = table.tolist()
        return found


def _store(rank: int, size: int, rendezvous: str, host: Host | None) -> Store:
    """The table through which ranks on several hosts find each other."""
    address, _, port = rendezvous.removeprefix("tcp://").rpartition(":")
    listener = None if host is None else host.listener
    return TCPStore(
        address,
        int(port),
        size,
        is_master=rank == 0,
        timeout=_TIMEOUT,
        wait_for_workers=False,
        # The listener is bound to one address; torch's own would listen on all of the host's.
        master_listen_fd=None if listener is None else listener.detach(),
    )


def use_interface(address: str) -> None:
    """Have gloo and NCCL use the network interface of an address of this host.

    Variables that are set already stay as they are.
    """
    for name, addresses in psutil.net_if_addrs().items():
        if any(found.address.partition("%")[0] == address for found in addresses):
            for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(variable, name)
            return
