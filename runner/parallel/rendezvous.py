"""Where ranks meet for their collectives: a file on one host, or a port that one of them opens."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import NamedTuple

from ..messages import EnginesMeet
from ..process import EngineOrders, Hosted
from .rank_processes import Host


class Rendezvous(NamedTuple):
    """The place of a group, as one of its ranks sees it."""

    where: str  # see `collectives.meet`
    host: Host | None = None  # of this process, if the group is on several hosts


def open_rendezvous(hosted: Hosted) -> Rendezvous:
    """Listen on a free port of this host for the ranks of a group. Raises OSError."""
    address = hosted.address
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.create_server((address, 0), family=family)
    return Rendezvous(f"tcp://{address}:{listener.getsockname()[1]}", Host(address, listener))


def rendezvous_of_engines(
    orders: EngineOrders, hosted: Hosted | None, tell: Callable[[EnginesMeet], None]
) -> Rendezvous:
    """The place of all ranks of the engines that share experts, for the first rank of one of them.

    On several hosts the first engine listens and tells the server, which then starts the others.
    Raises OSError.
    """
    if hosted is None:
        return Rendezvous(f"{orders.folder}/ranks")
    if orders.rendezvous:
        return Rendezvous(orders.rendezvous, Host(hosted.address))
    found = open_rendezvous(hosted)
    tell(EnginesMeet(found.where))
    return found
