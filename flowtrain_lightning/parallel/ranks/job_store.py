"""Lets the ranks of a job find each other before they have groups, and names those that do not come."""

from __future__ import annotations

import errno
import ipaddress
import os
import secrets
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from flowtrain_lightning.parallel.ranks.job_secret import ForeignMessageError, job_key
from flowtrain_lightning.parallel.ranks.keyed_store import KeyedStore
from flowtrain_lightning.parallel.ranks.store_connection import NoStoreError, connect_to_store

_CAME, _NAMED, _KNOWN = "start/came/{}", "start/named/{}", "start/known/{}"
_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.01, 0.5  # between two looks


def agree_on_start(store: KeyedStore, rank: int, ranks: int) -> str:
    """The name of this start of a job, equal on all its ranks; all of them call it.

    torchrun keeps one store over all starts of a job, and each node numbers the starts by itself: one that comes later,
    or whose ranks start anew because others have, counts otherwise than the rest. So neither that number nor what lies
    in the store says which start a value is of.

    Every rank puts a word there that was never used. Rank 0 makes the name up and tells it to each rank beside that
    rank's word, until the rank says that it knows it. Only who has seen the new word can answer so, and only who has
    read that answer knows the name: what an earlier start has left is taken for neither.

    Raises:
        TimeoutError: some rank did not come within the store's timeout.
    """
    return _learn_name(store, rank) if rank else _tell_name(store, ranks)


def _tell_name(store: KeyedStore, ranks: int) -> str:
    name = secrets.token_hex(16)
    answered = dict.fromkeys(range(1, ranks), "")  # rank that does not know the name yet -> word that it put there last
    for in_time in _looks(store):
        for rank, word in list(answered.items()):
            came = _value(store, _CAME.format(rank))
            if came != word:
                store.set(_NAMED.format(rank), f"{came} {name}")
                answered[rank] = came
            elif _value(store, _KNOWN.format(rank)) == name:
                del answered[rank]
        if not answered:
            break
        if not in_time:
            raise TimeoutError(f"rank {', '.join(map(str, answered))} did not come")
    return name


def _learn_name(store: KeyedStore, rank: int) -> str:
    own_word = secrets.token_hex(16)
    store.set(_CAME.format(rank), own_word)
    for in_time in _looks(store):
        word, _, name = _value(store, _NAMED.format(rank)).partition(" ")
        if word == own_word:
            break
        if not in_time:
            raise TimeoutError("rank 0 did not come")
    store.set(_KNOWN.format(rank), name)
    return name


def _looks(store: KeyedStore) -> Iterator[bool]:
    """Lets one look at the store again and again, ever less often; whether there is time for another look."""
    end, pause = time.monotonic() + store.timeout.total_seconds(), _SHORTEST_SECONDS
    while True:
        yield time.monotonic() < end
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_SECONDS)


def _value(store: KeyedStore, key: str) -> str:
    """Reads what a rank of the job has put; nothing where none has."""
    return store.get(key).decode() if store.check([key]) else ""


_PRESENT = "flowtrain/present/{}"
"""In the job's store: the rank of that number has come, and the name of its node."""

_root_stores: dict[int, KeyedStore] = {}  # by process: a fork must not speak through its parent's connection


def root_store(rank: int, ranks: int, timeout: timedelta) -> KeyedStore:
    """The store of the whole job, through which its ranks find each other; groups come later.

    Others may not have come yet when this returns; who needs them waits for what they put there.

    Args:
        rank: global rank.
        ranks: of the job.
        timeout: after which a rank gives up to wait for the others, or for what they are to put there.

    Raises:
        RuntimeError: rank 0, which keeps the store, does not come in time, its port is in use, something else is where
            it should be, or there is no secret.
    """
    if os.getpid() not in _root_stores:
        key = job_key(ranks)
        with readable_rendezvous_errors(rank, ranks, timeout):
            store = KeyedStore(_tcp_store(rank, timeout), key)
            if _torchrun_keeps_it():
                start = agree_on_start(store, rank, ranks)
                store = KeyedStore(PrefixStore(f"start {start}", store.inner), key.derive(f"start {start}"))
            store.set(_PRESENT.format(rank), socket.gethostname())
        _root_stores[os.getpid()] = store
    root = _root_stores[os.getpid()]
    root.set_timeout(timeout)  # an earlier run in this process may have had another one
    return root


def _tcp_store(rank: int, timeout: timedelta) -> Store:
    """The store at ``MASTER_ADDR``, which torchrun keeps, or rank 0. On one node no other one can reach rank 0's."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    of_torchrun = _torchrun_keeps_it()
    listener = None if rank or of_torchrun else _loopback_listener(host, port)

    def connect() -> Store:
        return TCPStore(
            host,
            port,
            is_master=rank == 0 and not of_torchrun,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,  # DDP may train in this process afterwards, at the same port
            master_listen_fd=None if listener is None else listener.detach(),  # the store closes it
        )

    return connect_to_store(connect, host, port, timeout.total_seconds())


def _torchrun_keeps_it() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _loopback_listener(host: str, port: int) -> socket.socket | None:
    """A socket that listens at ``host``, if that is this machine's own loopback; None where TCPStore shall make one."""
    family, *_, (address, *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    if not ipaddress.ip_address(str(address).partition("%")[0]).is_loopback:
        return None
    return socket.create_server((str(address), port), family=family, backlog=socket.SOMAXCONN)


def node_names(ranks: int) -> list[str]:
    """The name of each rank's node; all ranks are connected."""
    root = _root_stores[os.getpid()]
    return [root.get(_PRESENT.format(rank)).decode() for rank in range(ranks)]


@contextmanager
def readable_rendezvous_errors(rank: int, ranks: int, timeout: timedelta, store: Store | None = None) -> Iterator[None]:
    """Inside, errors of connections and stores become a sentence that says who is missing, or which port is in use."""
    try:
        yield
    except (ForeignMessageError, NoStoreError):
        raise
    except (RuntimeError, OSError) as error:
        if store is None and (getattr(error, "errno", None) == errno.EADDRINUSE or "EADDRINUSE" in str(error)):
            raise RuntimeError(
                f"Port {os.environ['MASTER_PORT']} on {os.environ['MASTER_ADDR']}, at which the ranks are to meet, is "
                "in use, by another run perhaps. Set MASTER_PORT to a free one, or unset it."
            ) from error
        missing = _missing(rank, ranks, timeout, store, error)
        raise RuntimeError(
            f"Rank {rank} could not connect to the other ranks: {missing}. Did a rank meet an error while it started? "
            "See the output of all of them."
        ) from error


def _missing(rank: int, ranks: int, timeout: timedelta, store: Store | None, error: Exception) -> str:
    within = f"within {timeout.total_seconds():g} s"
    if isinstance(error, TimeoutError):  # of `agree_on_start`, which knows
        return f"{error} {within}"
    if store is None:
        return f"not all {ranks} have come {within}" if rank == 0 else f"rank 0 was not there {within}, or has ended"
    try:
        # Rank 0 keeps the store, as a rule, and says that it has come when the others have.
        absent = [other for other in range(1, ranks) if not store.check([_PRESENT.format(other)])]
    except RuntimeError:
        return "rank 0, which keeps what they tell each other at the start, has ended"
    if not absent:
        return f"one of them has ended, or did not answer {within}"
    return f"{'rank' if len(absent) == 1 else 'ranks'} {', '.join(map(str, absent))} did not come {within}"
