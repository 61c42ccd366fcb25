"""CURVE keys: each rank has one, which follows from the job's secret, and so knows those of all others.

Whoever does not know the secret can neither name the key of a rank that it connects to, nor have one that is admitted.
Keys of a connection are made anew for each, so what was overheard can be neither read later nor said again.
"""

from __future__ import annotations

import hmac
from typing import NamedTuple

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

_DOMAIN = "flowtrain"


class CurveKey(NamedTuple):
    """The two halves of a key, in the text form that ZeroMQ takes."""

    public: bytes
    secret: bytes


def curve_key(secret: str, rank: int, ranks: int) -> CurveKey:
    """The key of one of ``ranks`` ranks of the job with this secret."""
    own = z85.encode(hmac.digest(secret.encode(), f"CURVE key of rank {rank} of {ranks}".encode(), "sha256"))
    return CurveKey(zmq.curve_public(own), own)


class _Admitted:
    """Says which keys are admitted, in the form in which pyzmq asks."""

    def __init__(self, keys: frozenset[bytes]) -> None:
        self._keys = keys

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether ``key`` is admitted."""
        return key in self._keys


def admit(socket: zmq.Socket[bytes], own: CurveKey, keys: frozenset[bytes]) -> ThreadAuthenticator:
    """Have a socket, before it is bound, accept connections from holders of these keys only.

    Returns:
        What answers for it (ZAP, ZeroMQ's protocol for admission). Once that is stopped nobody is admitted any more.
    """
    socket.curve_publickey, socket.curve_secretkey = own
    socket.curve_server = True
    socket.zap_domain = _DOMAIN.encode()
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # nobody is admitted without an answer
    authenticator = ThreadAuthenticator(socket.context)
    authenticator.log.setLevel("ERROR")  # else it warns of each stranger
    authenticator.start()
    authenticator.configure_curve_callback(domain=_DOMAIN, credentials_provider=_Admitted(keys))
    return authenticator
