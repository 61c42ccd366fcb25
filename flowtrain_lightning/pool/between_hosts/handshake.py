"""Proof, before a connection over the network is used, that both ends belong to one job.

Rank 0 makes a secret, which the others get through the job's store. Each end proves that it knows the secret by a
keyed hash over what both have said, a fresh random number of each among it, so a proof that was overheard is of no use
for another connection. The secret itself is never sent here, and what is sent is of fixed length. What follows on the
connection is not encrypted, as little as other traffic between ranks is.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from typing import NamedTuple

_CALL = struct.Struct("<4sIIII32s")  # magic, caller, answerer, ranks, purpose, the caller's random number
_MAGIC = b"FLT1"
_NONCE_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size


class Call(NamedTuple):
    """What a connection is for.

    Attributes:
        caller: the rank that connects.
        answerer: the rank that is connected to.
        ranks: how many there are.
        purpose: which of the connections between the two.
    """

    caller: int
    answerer: int
    ranks: int
    purpose: int


class Stranger(Exception):
    """The other end has not proved that it belongs to this job, or not in time."""


def make_secret() -> str:
    """A fresh secret, as text."""
    return secrets.token_hex(_PROOF_BYTES)


def place_call(connection: socket.socket, call: Call, secret: str, deadline: float) -> None:
    """Prove who is calling, and have the other end prove itself first.

    Args:
        connection: connected.
        call: what the connection is for.
        secret: of the job.
        deadline: in seconds of ``time.monotonic()``.

    Raises:
        Stranger: when it does not.
    """
    said = _CALL.pack(_MAGIC, *call, secrets.token_bytes(_NONCE_BYTES))
    _send(connection, said, deadline)
    answer = _receive(connection, _NONCE_BYTES + _PROOF_BYTES, deadline)
    said += answer[:_NONCE_BYTES]
    if not hmac.compare_digest(answer[_NONCE_BYTES:], _proof(secret, b"answerer", said)):
        raise Stranger("it does not know this job's secret")
    _send(connection, _proof(secret, b"caller", said), deadline)


def answer_call(connection: socket.socket, secret: str, deadline: float) -> Call:
    """Find out who is calling, as `place_call` says it.

    Raises:
        Stranger: when the caller does not prove itself.
    """
    said = _receive(connection, _CALL.size, deadline)
    magic, caller, answerer, ranks, purpose, _ = _CALL.unpack(said)
    if magic != _MAGIC:
        raise Stranger("it speaks another language")
    nonce = secrets.token_bytes(_NONCE_BYTES)
    said += nonce
    _send(connection, nonce + _proof(secret, b"answerer", said), deadline)
    if not hmac.compare_digest(_receive(connection, _PROOF_BYTES, deadline), _proof(secret, b"caller", said)):
        raise Stranger("it does not know this job's secret")
    return Call(caller, answerer, ranks, purpose)


def _proof(secret: str, side: bytes, said: bytes) -> bytes:
    return hmac.digest(secret.encode(), side + said, "sha256")


def _send(connection: socket.socket, message: bytes, deadline: float) -> None:
    try:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        connection.sendall(message)
    except OSError as error:
        raise Stranger(str(error)) from error


def _receive(connection: socket.socket, nbytes: int, deadline: float) -> bytes:
    message = b""
    while len(message) < nbytes:
        try:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            arrived = connection.recv(nbytes - len(message))
        except OSError as error:
            raise Stranger(str(error)) from error
        if not arrived:
            raise Stranger("it closed the connection")
        message += arrived
    return message
