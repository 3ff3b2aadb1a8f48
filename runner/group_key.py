"""The secret of the hosts that share one server, and the sockets that only its holders can use.

ZeroMQ's CURVE mechanism encrypts these sockets. The key pair of every listening socket is made from
the group's secret, and its public half is never sent: a client proves with its first packet that it
knows that half, and so does the listener with its answer that it knows the other. ZeroMQ closes the
connections of strangers before it reads any message of theirs.
"""

from __future__ import annotations

import hashlib
import socket
from typing import Any

import zmq
from zmq.utils import z85

_SALT = b"slipstream group"
_COST, _BLOCK, _MEMORY = 1 << 14, 8, 64 << 20  # of scrypt: 16 MiB and about 50 ms


def derive_key(secret: str) -> str:
    """The group's private key, 40 characters in ZeroMQ's base 85. Raises OSError without CURVE."""
    if not zmq.has("curve"):
        raise OSError("this ZeroMQ was built without CURVE, which connections between hosts need")
    key = hashlib.scrypt(
        secret.encode("utf-8", "surrogateescape"),
        salt=_SALT,
        n=_COST,
        r=_BLOCK,
        p=1,
        maxmem=_MEMORY,
        dklen=32,
    )
    return z85.encode(key).decode("ascii")


def listen(guarded: Any, address: str, key: str, port: int = 0) -> str:
    """Bind a ZeroMQ socket to an address of this host, for those who hold the key.

    Port 0 picks a free one. Returns the endpoint. Raises zmq.ZMQError, an OSError.
    """
    private = key.encode("ascii")
    guarded.curve_server = True
    guarded.curve_secretkey = private
    guarded.curve_publickey = zmq.curve_public(private)
    guarded.set(zmq.IPV6, int(":" in address))
    guarded.bind(f"tcp://{_bracketed(address)}:{port or '*'}")
    return str(guarded.get(zmq.LAST_ENDPOINT).rstrip(b"\0").decode("ascii"))


def connect(guarded: Any, endpoint: str, key: str) -> None:
    """Connect a ZeroMQ socket to one that a holder of the key listens on; does not wait."""
    guarded.curve_serverkey = zmq.curve_public(key.encode("ascii"))
    guarded.curve_publickey, guarded.curve_secretkey = zmq.curve_keypair()
    guarded.set(zmq.IPV6, int("[" in endpoint))
    guarded.connect(endpoint)


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def endpoint_of(address: str, port: int) -> str:
    return f"tcp://{_bracketed(address)}:{port}"


class NoSuchHost(OSError):
    """A name that no later attempt will resolve. The message is the reason, in small letters."""


def resolve(name: str, port: int) -> str:
    """The numeric address of a host's name. Raises OSError: NoSuchHost, unless another attempt may
    succeed."""
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise NoSuchHost("it is not a valid host name") from error
    except socket.gaierror as error:
        # No name has a colon or a number as its last part, whatever a resolver that is down says.
        is_numeric = ":" in name or name.rstrip(".").rpartition(".")[2].isdecimal()
        if error.errno == socket.EAI_AGAIN and not is_numeric:
            raise
        why = "it is not an address" if is_numeric else (error.strerror or str(error)).lower()
        raise NoSuchHost(why) from error
    return str(found[0][4][0])


def own_address(towards: str, port: int) -> str:
    """The address of this host from which it reaches another. Sends nothing. Raises OSError."""
    family = socket.AF_INET6 if ":" in towards else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, port))
        return str(probe.getsockname()[0])
