"""Authentication: proof, before a connection over the network is used, that both ends belong to one job.

All ranks have the job's secret. Each end proves that it knows it by a keyed hash over what both have said, a fresh
random number of each among it, so a proof that was overheard is of no use for another connection. The secret itself is
never sent, and what is sent is of fixed length. What follows on the connection is not encrypted, as little as other
traffic between ranks is.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
import time
from typing import NamedTuple

_CLAIM = struct.Struct("<4sIIII32s")  # magic, initiator, responder, ranks, purpose, the initiator's random number
_MAGIC = b"FLT1"
_NONCE_BYTES = 32
_PROOF_BYTES = hashlib.sha256().digest_size


class Claim(NamedTuple):
    """What a connection is said to be for.

    Attributes:
        initiator: the rank that connects.
        responder: the rank that is connected to.
        ranks: how many there are.
        purpose: which of the connections between the two.
    """

    initiator: int
    responder: int
    ranks: int
    purpose: int


class AuthenticationError(Exception):
    """The other end has not proved that it belongs to this job, or not in time."""


def make_secret() -> str:
    """A fresh secret, as text."""
    return secrets.token_hex(_PROOF_BYTES)


def authenticate_initiator(connection: socket.socket, claim: Claim, secret: str, deadline: float) -> None:
    """On the end that connects: have the other end prove that it belongs to the job, then prove it, too.

    Args:
        connection: connected.
        claim: what the connection is for.
        secret: of the job.
        deadline: in seconds of ``time.monotonic()``.

    Raises:
        AuthenticationError: when the other end does not.
    """
    said = _CLAIM.pack(_MAGIC, *claim, secrets.token_bytes(_NONCE_BYTES))
    _send(connection, said, deadline)
    answer = _receive(connection, _NONCE_BYTES + _PROOF_BYTES, deadline)
    said += answer[:_NONCE_BYTES]
    if not hmac.compare_digest(answer[_NONCE_BYTES:], _proof(secret, b"responder", said)):
        raise AuthenticationError("it does not know this job's secret")
    _send(connection, _proof(secret, b"initiator", said), deadline)


class Responder:
    """The end that is connected to. It never waits, so that one thread can answer many, silent ones among them.

    Args:
        connection: connected; non-blocking from now on.
        secret: of the job.
        deadline: in seconds of ``time.monotonic()``.
    """

    def __init__(self, connection: socket.socket, secret: str, deadline: float) -> None:
        connection.setblocking(False)
        self.connection = connection
        self._secret = secret
        self._deadline = deadline
        self._arrived = b""
        self._said = b""  # by both, once this end has answered
        self._claim: Claim | None = None

    def advance(self) -> Claim | None:
        """Take in what has arrived.

        Returns:
            What the other end claims, once it has proved that it belongs to the job; None while more is to come.

        Raises:
            AuthenticationError: when it does not prove it, or not in time.
        """
        if time.monotonic() > self._deadline:
            raise AuthenticationError("timed out")
        try:
            if self._claim is None and self._receive(_CLAIM.size):
                self._answer()
            if self._claim is None or not self._receive(_PROOF_BYTES):
                return None
        except OSError as error:
            raise AuthenticationError(str(error)) from error
        if not hmac.compare_digest(self._arrived, _proof(self._secret, b"initiator", self._said)):
            raise AuthenticationError("it does not know this job's secret")
        return self._claim

    def _answer(self) -> None:
        magic, *claim, _ = _CLAIM.unpack(self._arrived)
        if magic != _MAGIC:
            raise AuthenticationError("it speaks another language")
        nonce = secrets.token_bytes(_NONCE_BYTES)
        self._said, self._arrived = self._arrived + nonce, b""
        self._claim = Claim(*claim)
        self.connection.sendall(nonce + _proof(self._secret, b"responder", self._said))  # fits into an empty buffer

    def _receive(self, nbytes: int) -> bool:
        """Whether all of so many bytes have arrived."""
        while len(self._arrived) < nbytes:
            try:
                arrived = self.connection.recv(nbytes - len(self._arrived))
            except BlockingIOError:
                return False
            if not arrived:
                raise AuthenticationError("it closed the connection")
            self._arrived += arrived
        return True


def _proof(secret: str, side: bytes, said: bytes) -> bytes:
    return hmac.digest(secret.encode(), side + said, "sha256")


def _send(connection: socket.socket, message: bytes, deadline: float) -> None:
    try:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        connection.sendall(message)
    except OSError as error:
        raise AuthenticationError(str(error)) from error


def _receive(connection: socket.socket, nbytes: int, deadline: float) -> bytes:
    message = b""
    while len(message) < nbytes:
        try:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            arrived = connection.recv(nbytes - len(message))
        except OSError as error:
            raise AuthenticationError(str(error)) from error
        if not arrived:
            raise AuthenticationError("it closed the connection")
        message += arrived
    return message
