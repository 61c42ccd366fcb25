"""A name for this start of a job, which all its ranks learn in a store that may still hold what earlier starts left.

torchrun keeps one store over all starts of a job, and each node numbers the starts by itself: one that comes later, or
whose ranks start anew because others have, counts otherwise than the rest. So neither that number nor what lies in the
store says which start a value is of.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator

from flowtrain_lightning.parallel.keyed_store import KeyedStore

_CAME, _NAMED, _KNOWN = "start/came/{}", "start/named/{}", "start/known/{}"
_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.01, 0.5  # between two looks


def agree_on_start(store: KeyedStore, rank: int, ranks: int) -> str:
    """The name of this start, equal on all its ranks; all of them call it.

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
    """What a rank of the job has put; nothing where none has."""
    return store.get(key).decode() if store.check([key]) else ""
