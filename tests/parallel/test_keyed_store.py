"""Values of the job's store are believed only if a rank of the job has put them there."""

import threading
import time
from datetime import timedelta

import pytest
from torch.distributed import HashStore, PrefixStore

from flowtrain_lightning.parallel import keyed_store
from flowtrain_lightning.parallel.job_secret import ForeignMessageError, JobKey
from flowtrain_lightning.parallel.keyed_store import KeyedStore


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
