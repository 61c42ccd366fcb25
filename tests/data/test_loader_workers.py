"""Workers of a loader: they change nothing, tell their errors, and end with the loader or its process."""

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch

from flowtrain_lightning.data.steps import StepDataset
from tests.data.loading import read
from tests.data.support import write_set


def children():
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_workers_change_nothing(loader_of):
    alone, helped = loader_of(), loader_of(num_workers=2)
    for mine, theirs in zip(alone, helped, strict=True):
        for left, right in zip(mine.microbatches, theirs.microbatches, strict=True):
            assert torch.equal(left.tokens, right.tokens)
            assert torch.equal(left.labels, right.labels)
        for left, right in zip(mine.encoder_batches, theirs.encoder_batches, strict=True):
            assert (left is None) == (right is None)
            assert left is None or torch.equal(left.patches, right.patches)


@pytest.mark.timeout(60)
def test_workers_start_while_another_loader_s_thread_loads_and_hold_none_of_its_locks(loader_of, monkeypatch):
    lock, load = threading.Lock(), StepDataset.load

    def slow(*arguments):
        with lock:
            time.sleep(0.2)
            return load(*arguments)

    monkeypatch.setattr(StepDataset, "load", slow)
    alone, helped = loader_of(), loader_of(num_workers=2)
    ahead = iter(alone)
    next(ahead)  # its thread goes on with the next step, and holds the lock
    assert len(read(helped)) == 5
    assert len(list(ahead)) == 4


def test_workers_stay_for_the_next_epoch_and_end_with_the_loader(loader_of):
    before = children()
    loader = loader_of(num_workers=2)
    read(loader)
    first = children() - before
    read(loader, epoch=1)
    assert children() - before == first
    loader.close()
    assert not (children() - before) & first
    assert len(read(loader)) == 5


def test_workers_die_with_their_parent(tmp_path):
    write_set(tmp_path / "d.jsonl", 8)
    script = """if True:
        import sys, threading, time
        import psutil
        from tests.data.support import data_module
        data = data_module(sys.argv[1], num_workers=2, augment=lambda picture, _: time.sleep(60))
        data.setup("fit")
        iterator = iter(data.train_dataloader())
        threading.Thread(target=next, args=(iterator,), daemon=True).start()
        while len(psutil.Process().children()) < 2:
            time.sleep(0.05)
        print(*(child.pid for child in psutil.Process().children()), flush=True)
        time.sleep(60)
    """
    parent = subprocess.Popen([sys.executable, "-c", script, tmp_path / "d.jsonl"], stdout=subprocess.PIPE, text=True)
    workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    time.sleep(0.5)
    assert len(workers) == 2
    parent.kill()
    parent.wait()
    assert psutil.wait_procs(workers, timeout=3)[1] == []


def test_an_error_in_a_worker_names_file_and_record(loader_of, tmp_path):
    loader = loader_of(num_workers=1)
    for picture in (tmp_path / "pictures").iterdir():
        picture.write_bytes(b"")
    with pytest.raises(ValueError, match=r"d\.jsonl, record \d+ .*cannot be used"):
        read(loader)


def test_a_dead_worker_is_an_error_and_no_hang(loader_of):
    loader = loader_of(num_workers=1, augment=lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RuntimeError, match="worker"):
        read(loader)
