"""Values of the job's store are believed only if a rank of the job has put them there."""

import threading
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore, PrefixStore

from flowtrain_lightning.parallel.ranks import keyed_store
from flowtrain_lightning.parallel.ranks.job_secret import ForeignMessageError, JobKey
from flowtrain_lightning.parallel.ranks.job_store import agree_on_start
from flowtrain_lightning.parallel.ranks.keyed_store import KeyedStore
from flowtrain_lightning.pool import Mesh


@pytest.fixture
def inner():
    store = HashStore()
    store.set_timeout(timedelta(seconds=20))
    return store


@pytest.fixture
def store(inner):
    return KeyedStore(inner, JobKey(b"secret"))


def test_ranks_read_what_ranks_have_put(inner, store):
    store.set("text", "some")
    store.multi_set(["one", "other"], [b"1", b"2"])
    again = KeyedStore(inner, JobKey(b"secret"))
    assert (again.get("text"), again.multi_get(["one", "other"])) == (b"some", [b"1", b"2"])
    assert again.check(["text", "one"])
    assert not again.check(["text", "none"])
    assert again.delete_key("text")
    assert not again.check(["text"])


def test_it_works_below_a_prefix_as_process_groups_need_it(store):
    below = PrefixStore("group", store)
    below.set("address", b"\x00\xff")
    assert below.get("address") == store.get("group/address") == b"\x00\xff"


@pytest.mark.parametrize("planted", [b"", b"a pickle", bytes(100)])
def test_what_somebody_else_has_put_there_counts_as_not_there_until_the_rank_comes(inner, store, planted):
    inner.set("address", planted)
    assert not store.check(["address"])
    rank = threading.Thread(target=lambda: (time.sleep(0.1), store.set("address", b"true")))
    rank.start()
    assert store.get("address") == b"true"
    rank.join()


def test_a_value_cannot_be_moved_to_another_key(inner, store):
    store.set("address of rank 1", b"1")
    inner.set("address of rank 2", inner.get("address of rank 1"))
    assert not store.check(["address of rank 2"])


def test_a_rank_that_waits_in_vain_says_that_it_did_not_believe(inner, store, monkeypatch):
    monkeypatch.setattr(keyed_store, "FOREIGN_SECONDS", 0.1)
    KeyedStore(inner, JobKey(b"the secret of another node")).set("address", b"other")
    words = r"'address' of the job's store was not said with this job's secret.*set FLOWTRAIN_JOB_SECRET to one value"
    with pytest.raises(ForeignMessageError, match=words):
        store.get("address")


def test_a_rank_that_looks_again_and_again_in_vain_says_so_as_well(inner, store, monkeypatch):
    now = [0.0]  # by a clock of its own, which no busy machine stops
    monkeypatch.setattr(keyed_store, "time", SimpleNamespace(monotonic=lambda: now[0]))
    inner.set("address", b"planted")
    for now[0] in (0.0, 1.0, keyed_store.FOREIGN_SECONDS):
        assert not store.check(["address"])
    now[0] += 1.0
    with pytest.raises(ForeignMessageError, match="'address' of the job's store was not said with this job's secret"):
        store.check(["address"])


def test_a_value_that_the_rank_has_replaced_is_believed_and_the_minute_begins_anew(inner, store, monkeypatch):
    monkeypatch.setattr(keyed_store, "FOREIGN_SECONDS", 0.3)
    inner.set("address", b"planted")
    assert not store.check(["address"])
    store.set("address", b"true")
    assert store.check(["address"])
    time.sleep(0.4)
    inner.set("address", b"planted")
    assert not store.check(["address"])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_start_that_torchrun_gives_an_overwritten_store_ends_and_says_so(inner, store, monkeypatch, rank):
    monkeypatch.setattr(keyed_store, "FOREIGN_SECONDS", 0.3)
    inner.set(f"start/{'came' if rank == 0 else 'named'}/1", b"planted")
    with pytest.raises(ForeignMessageError, match="was not said with this job's secret"):
        agree_on_start(store, rank, 2)


@pytest.mark.parametrize("where", [{}, {"address": "127.0.0.1", "location": "host 0", "secret": "known"}])
def test_ranks_of_a_pool_whose_store_is_overwritten_end_and_say_so(inner, store, monkeypatch, where):
    monkeypatch.setattr(keyed_store, "FOREIGN_SECONDS", 0.3)
    for key in ("mesh/0", "mesh/host/0"):
        inner.set(key, b"planted")
    with pytest.raises(RuntimeError, match="was not said with this job's secret"):
        Mesh.connect(store, 1, 2, ["backbone 0", "encoder 0"], timeout=20, **where)
