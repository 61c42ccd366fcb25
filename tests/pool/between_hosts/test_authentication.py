"""Both ends of a connection prove that they belong to one job."""

import socket
import threading
import time

import pytest

from flowtrain_lightning.pool.between_hosts.authentication import (
    AuthenticationError,
    Claim,
    Responder,
    authenticate_initiator,
    make_secret,
)

CLAIM = Claim(initiator=3, responder=1, ranks=4, purpose=2)


@pytest.fixture
def ends():
    one, other = socket.socketpair()
    yield one, other
    one.close()
    other.close()


def soon(seconds=30.0):
    return time.monotonic() + seconds


def answer_of(responder):
    """What the other end claims, once it has proved it."""
    while (claim := responder.advance()) is None:
        time.sleep(0.001)
    return claim


def answering(connection, secret):
    """A thread that answers, and the list into which it puts what comes of it."""
    outcome = []

    def answer():
        try:
            outcome.append(answer_of(Responder(connection, secret, soon())))
        except AuthenticationError as error:
            outcome.append(str(error))
            connection.close()

    thread = threading.Thread(target=answer)
    thread.start()
    return thread, outcome


def test_who_knows_the_secret_is_let_in_and_says_who_it_is(ends):
    secret = make_secret()
    thread, outcome = answering(ends[1], secret)
    authenticate_initiator(ends[0], CLAIM, secret, soon())
    thread.join()
    assert outcome == [CLAIM]


def test_neither_end_accepts_one_that_does_not_know_the_secret(ends):
    thread, outcome = answering(ends[1], make_secret())
    with pytest.raises(AuthenticationError, match="does not know this job's secret"):
        authenticate_initiator(ends[0], CLAIM, make_secret(), soon())
    ends[0].close()
    thread.join()
    assert outcome == ["it closed the connection"], "an initiator proves nothing to one that does not belong to the job"


def test_a_proof_that_was_overheard_opens_no_other_connection(ends):
    secret, heard = make_secret(), []

    class Overheard:
        def sendall(self, message):
            heard.append(message)
            ends[0].sendall(message)

        def __getattr__(self, name):
            return getattr(ends[0], name)

    thread, outcome = answering(ends[1], secret)
    authenticate_initiator(Overheard(), CLAIM, secret, soon())
    thread.join()
    assert outcome == [CLAIM]
    assert not any(secret.encode() in message for message in heard)
    again, other = socket.socketpair()
    with again, other:
        thread, outcome = answering(other, secret)
        again.sendall(heard[0])
        again.recv(64)
        again.sendall(heard[1])
        thread.join()
    assert outcome == ["it does not know this job's secret"]


def test_an_answer_cannot_be_sent_back_as_the_initiators_proof(ends):
    thread, outcome = answering(ends[1], make_secret())
    ends[0].sendall(b"FLT1" + bytes(48))
    answer = ends[0].recv(64)
    ends[0].sendall(answer[32:])
    thread.join()
    assert outcome == ["it does not know this job's secret"]


def test_whoever_says_nothing_or_nonsense_is_refused(ends):
    with pytest.raises(AuthenticationError, match="timed out"):
        answer_of(Responder(ends[1], make_secret(), soon(0.1)))
    ends[0].sendall(b"GET / HTTP/1.1\r\n" + bytes(100))
    with pytest.raises(AuthenticationError, match="another language"):
        answer_of(Responder(ends[1], make_secret(), soon()))
