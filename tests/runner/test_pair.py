"""Pairs between hosts: the group's secret lets its holders in, and keeps strangers out."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
import zmq

from slipstream.runner.channel import ServerChannel, WorkerChannel
from slipstream.runner.group_key import derive_key, own_address, resolve
from slipstream.runner.messages import Fatal, Shutdown
from slipstream.runner.pair import ConnectedPair, Listening, ListeningPair

KEY = derive_key("a secret of the hosts")


@pytest.fixture
async def pair() -> AsyncIterator[ListeningPair]:
    pair = ListeningPair(Listening("127.0.0.1", KEY))
    yield pair
    pair.close()


def port_of(endpoint: str) -> int:
    return int(endpoint.rpartition(":")[2])


def test_a_secret_has_one_key_and_another_secret_has_another() -> None:
    assert derive_key("a secret of the hosts") == KEY and len(KEY) == 40
    assert derive_key("another secret of the hosts") != KEY


async def test_holders_of_the_key_exchange_packets_and_notice_the_others_end(
    pair: ListeningPair,
) -> None:
    other = ConnectedPair(pair.endpoint, KEY)
    await asyncio.wait_for(asyncio.gather(pair.connected(), other.connected()), 5)
    other.send_packet(b"up" * 20_000_000)  # more than a frame
    pair.send_packet(b"down")
    assert await asyncio.wait_for(pair.receive_packet(), 10) == b"up" * 20_000_000
    assert await asyncio.wait_for(other.receive_packet(), 5) == b"down"
    other.close()
    await asyncio.wait_for(pair.disconnected(), 5)


async def test_a_channel_between_hosts_is_one_like_any_other() -> None:
    server = ServerChannel(Listening("127.0.0.1", KEY))
    worker = WorkerChannel(server.endpoint, KEY)
    worker.send([Fatal("sorry")])
    assert await asyncio.wait_for(server.receive(), 5) == [Fatal("sorry")]
    server.send([Shutdown()])
    assert worker.receive(5.0) == [Shutdown()]
    worker.close()
    await asyncio.wait_for(server.disconnected(), 5)
    server.close()


@pytest.mark.parametrize("kind", ["another key", "no key", "bytes", "silence"])
async def test_a_stranger_is_heard_by_no_one_and_disturbs_no_one(
    kind: str, pair: ListeningPair
) -> None:
    friend = ConnectedPair(pair.endpoint, KEY)
    friend.send_packet(b"hello")
    assert await asyncio.wait_for(pair.receive_packet(), 5) == b"hello"
    ended = asyncio.create_task(pair.disconnected())
    with zmq.Context() as context, socket.socket() as plain:
        stranger = context.socket(zmq.PAIR)
        stranger.set(zmq.LINGER, 0)
        if kind == "another key":
            other = derive_key("a guess at the secret")
            stranger.curve_serverkey = zmq.curve_public(other.encode())
            stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        if kind in ("another key", "no key"):
            stranger.connect(pair.endpoint)
            stranger.send(b"let me in")
        else:
            plain.connect(("127.0.0.1", port_of(pair.endpoint)))
        if kind == "bytes":
            plain.sendall(b"\xff\x80\x04\x95" + b"cos\nsystem\n(S'true'\ntR." * 40)
        heard = asyncio.create_task(pair.receive_packet())
        await asyncio.sleep(0.3)
        assert not heard.done() and not ended.done()
        stranger.close()
    friend.send_packet(b"still here")
    assert await asyncio.wait_for(heard, 5) == b"still here"
    assert not ended.done()
    friend.close()
    await asyncio.wait_for(ended, 5)


async def test_a_port_in_use_is_an_error_of_the_machine() -> None:
    with pytest.raises(OSError, match="assign"):
        ListeningPair(Listening("192.0.2.1", KEY))  # an address of documentation


def test_addresses() -> None:
    assert resolve("localhost", 1) in ("127.0.0.1", "::1")
    assert own_address("127.0.0.1", 9) == "127.0.0.1"
