"""Ports that let nobody in any more, while those stay who have come."""

import socket

import pytest

from flowtrain_lightning.ports import shut_at_the_end


def connects(address):
    try:
        socket.create_connection(address, 0.5).close()
    except TimeoutError:
        return False
    return True


@pytest.fixture
def listeners():
    made = []

    def listen():
        made.append(socket.create_server(("127.0.0.1", 0)))
        return made[-1]

    yield listen
    for each in made:
        each.close()


def test_only_ports_that_were_opened_inside_are_shut_at_the_end(listeners):
    before = listeners()
    with shut_at_the_end():
        inside = listeners()
        assert connects(inside.getsockname())
    assert not connects(inside.getsockname())
    assert connects(before.getsockname())
    assert connects(listeners().getsockname())


def test_whoever_has_come_in_time_stays(listeners):
    with shut_at_the_end():
        listener = listeners()
        early = socket.create_connection(listener.getsockname())
    accepted, _ = listener.accept()
    with early, accepted:
        early.sendall(b"here")
        assert accepted.recv(4) == b"here"
