"""Ranks that cannot find each other say why, and those of one start agree on its name, whatever lies in the store."""

from __future__ import annotations

import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from torch.distributed import HashStore

from flowtrain_lightning.parallel.ranks.job_secret import JobKey
from flowtrain_lightning.parallel.ranks.job_store import agree_on_start, root_store
from flowtrain_lightning.parallel.ranks.keyed_store import KeyedStore
from tests.ports import free_port
from tests.processes import assert_all_good, run_ranks


def rendezvous(port):
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def come_to_a_port_in_use(rank, ranks, port):
    words = f"Port {port} on 127.0.0.1, at which the ranks are to meet, is in use, by another run perhaps. Set"
    with pytest.raises(RuntimeError, match=f"^{re.escape(words)}"):
        root_store(rank, 2, timedelta(seconds=3600))


def test_a_port_that_another_run_uses_is_told_as_such_and_no_rank_is_missed():
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        assert_all_good(run_ranks(come_to_a_port_in_use, 1, arguments=[port], env=rendezvous(port)))


def come_twice(rank, ranks):
    for seconds in (8, 3600):
        assert root_store(rank, ranks, timedelta(seconds=seconds)).timeout == timedelta(seconds=seconds)


def test_the_store_of_a_second_run_in_the_process_has_that_runs_timeout():
    assert_all_good(run_ranks(come_twice, 1, env=rendezvous(free_port())))


@pytest.fixture
def store():
    inner = HashStore()
    inner.set_timeout(timedelta(seconds=60))
    return KeyedStore(inner, JobKey(b"secret"))


def start(store, ranks, late=None):
    """The name that each rank learns; one of them comes later than the others."""

    def come(rank):
        if rank == late:
            time.sleep(0.3)
        return agree_on_start(store, rank, ranks)

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(come, range(ranks)))


@pytest.mark.parametrize(
    "late", [None, 0, pytest.param(1, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)]
)
def test_every_rank_learns_one_name_and_each_start_has_another_one(store, late):
    names = [start(store, 4, late) for _ in range(3)]
    assert [len(set(each)) for each in names] == [1, 1, 1]
    assert len({each[0] for each in names}) == 3


def test_a_start_on_fewer_ranks_and_on_more_again_is_a_start_like_any_other(store):
    names = [start(store, ranks, late=1) for ranks in (4, 2, 4, 1)]
    assert [len(set(each)) for each in names] == [1, 1, 1, 1]
    assert len({each[0] for each in names}) == 4


def test_a_rank_of_an_earlier_start_that_never_got_its_answer_disturbs_nobody(store):
    store.inner.set_timeout(timedelta(seconds=0.2))
    with pytest.raises(TimeoutError, match="rank 0 did not come"):
        agree_on_start(store, 1, 2)
    store.inner.set_timeout(timedelta(seconds=60))
    assert len(set(start(store, 2, late=1))) == 1


def test_who_does_not_come_is_told(store):
    store.inner.set_timeout(timedelta(seconds=0.5))
    came = threading.Thread(target=agree_on_start, args=(store, 2, 4))
    came.start()
    with pytest.raises(TimeoutError, match="rank 1, 3 did not come"):
        agree_on_start(store, 0, 4)
    came.join()
