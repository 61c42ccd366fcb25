"""The thread that talks to ranks of other hosts: which events of a connection tell that its rank has ended."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator
from mmap import mmap

import pytest
import zmq

from flowtrain_lightning.pool.between_hosts.connections import ConnectionEvents, RemoteConnections
from flowtrain_lightning.pool.between_hosts.hosts_thread import HostsThread
from flowtrain_lightning.pool.between_hosts.remote_status import RemoteStatusPage
from flowtrain_lightning.pool.status_page import PAGE_BYTES, StatusPage

CONNECTION = 1 << 20
"""The descriptor of the one connection to rank 1, as events name it; no file has it."""

DEADLINE = 20.0


@pytest.fixture
def events() -> Iterator[zmq.Socket[bytes]]:
    context = zmq.Context()
    with context.socket(zmq.PAIR) as socket:
        socket.bind("inproc://events")
        yield socket


@pytest.fixture
def peer(events: zmq.Socket[bytes]) -> Iterator[RemoteStatusPage]:
    """The page of rank 1 as rank 0 has it while its thread runs."""
    context = events.context
    monitor = context.socket(zmq.PAIR)
    monitor.connect("inproc://events")
    connections = RemoteConnections(0, context.socket(zmq.ROUTER), ConnectionEvents(monitor), (), {CONNECTION: 1}, [])
    page = RemoteStatusPage(1, "encoder 0")
    own = StatusPage(0, mmap(-1, PAGE_BYTES))
    thread = HostsThread(own, connections, {1: page}, 2, wake=lambda: None, fail=lambda sentence, rank: None)
    yield page
    events.close()
    thread.close()
    os.close(page.ended)


def tell(events: zmq.Socket[bytes], event: int) -> None:
    events.send_multipart([struct.pack("=hi", event, CONNECTION), b"tcp://10.0.0.2:1"])


def test_a_rank_whose_connection_ends_is_lost_though_its_beginning_is_told_late(events, peer):
    for event in (zmq.EVENT_CONNECTED, zmq.EVENT_ACCEPTED, zmq.EVENT_DISCONNECTED):
        assert not peer.read().lost
        tell(events, event)
    until = time.monotonic() + DEADLINE
    while not peer.read().lost and time.monotonic() < until:
        time.sleep(0.01)
    assert peer.read().lost == "died (its connection was closed)"
