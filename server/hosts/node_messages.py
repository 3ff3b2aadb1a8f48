"""The messages between the first node's hub and the agents of the others, in msgpack.

An agent first asks the hub's port to let its node join, and then has a pair of sockets of its own.
"""

from __future__ import annotations

import msgspec

from ...runner.process import WorkerOrders

MAX_JOIN_BYTES = 64 << 10
MODULES = ("engine.worker", "engine.rank")  # what an agent may start


class Join(msgspec.Struct, frozen=True):
    """The first message: which node this is, and what must agree with the first node."""

    version: str  # of this package
    node: int
    nnodes: int
    model: str
    digest: str  # of the model's files, see `agreement.model_digest`; "" if it is not known
    address: str = ""  # of the node, numeric, as the first node reaches it
    num_devices: int = 0  # GPUs that it shows; 0 = none


class Welcome(msgspec.Struct, tag=True):
    """The node may connect to this endpoint."""

    endpoint: str


class Refused(msgspec.Struct, tag=True):
    """The node may not join; one sentence says why. A later attempt may succeed if `is_early`."""

    message: str
    is_early: bool = False


class Hello(msgspec.Struct, tag=True):
    """The node has joined."""


class Ended(msgspec.Struct, tag=True):
    """A process has ended; its exit status, or minus the number of the signal that killed it."""

    process: int
    status: int


class NotStarted(msgspec.Struct, tag=True):
    """A process could not be started; the reason as a clause."""

    process: int
    reason: str


class Leaving(msgspec.Struct, tag=True):
    """A signal asks the node to end: the server is to drain and stop."""


class Start(msgspec.Struct, tag=True):
    """Start a module of this package as a process, which later messages call by its number."""

    process: int
    module: str  # one of `MODULES`
    orders: WorkerOrders
    slot: int  # which of the node's devices it takes, from 0


class Kill(msgspec.Struct, tag=True):
    process: int


class Release(msgspec.Struct, tag=True):
    """Let a process end itself, as when its parent ends."""

    process: int


class Bye(msgspec.Struct, tag=True):
    """The server has stopped: the node ends."""


ToNode = Start | Kill | Release | Bye
FromNode = Hello | Ended | NotStarted | Leaving

encoder = msgspec.msgpack.Encoder()
join_decoder = msgspec.msgpack.Decoder(Join)
reply_decoder = msgspec.msgpack.Decoder(Welcome | Refused)
to_node_decoder = msgspec.msgpack.Decoder(ToNode)
from_node_decoder = msgspec.msgpack.Decoder(FromNode)
