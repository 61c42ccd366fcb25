"""Workers of a loader: they change nothing, tell their errors, and end with the loader or its process."""

import os
import pickle
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress

import numpy as np
import psutil
import pytest
import torch

from flowtrain_lightning.data import PackedBatch, PackedMedia, RankShard, StepBatch
from flowtrain_lightning.data.loading.dataset import StepDataset
from flowtrain_lightning.data.loading.worker_channels import WorkerChannel
from flowtrain_lightning.data.loading.workers import PackedParts
from flowtrain_lightning.packing import SampleSizes
from flowtrain_lightning.packing.step_planner import plan_step
from tests.data.support import data_module, read, write_set
from tests.packing.sizes import members_of
from tests.paths import python_path
from tests.processes import Ranks


def batch_of_one_step():
    one = np.array([3])
    sizes = SampleSizes(one, one, np.array([0, 1]), one, one)
    plan = plan_step(sizes, np.array([5]), members_of(), token_budget=9)
    numbers = torch.arange(3)
    packed = PackedBatch(numbers, -numbers, numbers, numbers.int(), 3, {"image": numbers[1:]}, (5,), numbers[:1])
    media = PackedMedia("image", torch.rand(5, 3), torch.tensor([0, 5], dtype=torch.int32), numbers[None], 5, (1,))
    return StepBatch(plan, RankShard.plain(0, 1), (packed, None), {"encoder": (media, None)}, epoch=2, step=4)


def test_a_shared_memory_batch_brings_the_batch_unchanged():
    batch = batch_of_one_step()
    opened = pickle.loads(pickle.dumps(PackedParts.of(batch).packed())).open()
    (packed, nothing), (media, none) = opened.microbatches, opened.media["encoder"]
    assert nothing is none is None
    assert (opened.epoch, opened.step, opened.shard) == (2, 4, batch.shard)
    assert opened.plan.samples.tolist() == [5]
    assert opened.following(1) is None
    for name in ("tokens", "labels", "position_ids", "cu_seqlens"):
        assert torch.equal(getattr(packed, name), getattr(batch.microbatches[0], name))
        assert getattr(packed, name).dtype == getattr(batch.microbatches[0], name).dtype
    assert torch.equal(packed.media_positions["image"], batch.microbatches[0].media_positions["image"])
    assert torch.equal(media.patches, batch.media["encoder"][0].patches)
    assert (packed.samples, packed.max_seqlen, media.rows) == ((5,), 3, (1,))


def test_all_tensors_travel_in_one_block():
    opened = PackedParts.of(batch_of_one_step()).packed().open()
    packed, media = opened.microbatches[0], opened.media["encoder"][0]
    storages = {tensor.untyped_storage().data_ptr() for tensor in (packed.tokens, packed.labels, media.patches)}
    assert len(storages) == 1
    assert media.patches.data_ptr() % 64 == packed.labels.data_ptr() % 64


def children():
    return {child.pid for child in psutil.Process().children(recursive=True)}


def test_workers_change_nothing(loader_of):
    alone, helped = loader_of(), loader_of(num_workers=2)
    for mine, theirs in zip(alone, helped, strict=True):
        for left, right in zip(mine.microbatches, theirs.microbatches, strict=True):
            assert torch.equal(left.tokens, right.tokens)
            assert torch.equal(left.labels, right.labels)
        for left, right in zip(mine.media["encoder"], theirs.media["encoder"], strict=True):
            assert (left is None) == (right is None)
            assert left is None or torch.equal(left.patches, right.patches)


def test_workers_start_between_the_loads_of_other_threads_and_hold_no_lock_of_theirs(loader_of, monkeypatch):
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


def test_killed_workers_leave_no_file_and_their_steps_can_still_be_read(loader_of, tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    before = children()
    loader = loader_of(num_workers=2)
    steps = iter(loader)
    step = next(steps)
    sums = [int(packed.tokens.sum()) for packed in step.microbatches]
    for worker in [psutil.Process(pid) for pid in children() - before]:
        with suppress(RuntimeError):  # by which PyTorch tells of its end
            worker.kill()
            # Left for the loader to collect: a child that was collected by others counts as alive for multiprocessing.
            os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)
    loader.close()
    assert [int(packed.tokens.sum()) for packed in step.microbatches] == sums
    assert list(temporary.iterdir()) == []


def test_a_channel_skips_blocks_that_nobody_asked_for():
    channel = WorkerChannel()
    tokens = [channel.send(torch.full((8,), value, dtype=torch.uint8)) for value in (1, 2, 3)]
    assert channel.receive(tokens[2], 8).tolist() == [3] * 8


def load_without_end(rank, ranks, file, busy):
    def wait(*_):
        (busy / str(os.getpid())).touch()
        time.sleep(60)

    data = data_module(file, num_workers=2, augment=wait)
    data.setup("fit")
    next(iter(data.train_dataloader()))


def test_workers_die_with_their_parent(tmp_path):
    file, busy = write_set(tmp_path / "d.jsonl", 8), tmp_path / "busy"
    busy.mkdir()
    with Ranks(load_without_end, 1, [file, busy]) as parent:
        end = time.monotonic() + 60
        while len(workers := [psutil.Process(int(file.name)) for file in busy.iterdir()]) < 2:
            assert time.monotonic() < end
            time.sleep(0.05)
        parent.signal(0, signal.SIGKILL)
        assert psutil.wait_procs(workers, timeout=30)[1] == []  # well before they would go on


def test_an_error_in_a_worker_names_file_and_record(loader_of, tmp_path):
    loader = loader_of(num_workers=1)
    for image in (tmp_path / "images").iterdir():
        image.write_bytes(b"")
    with pytest.raises(ValueError, match=r"d\.jsonl, record \d+ .*was rewritten"):
        read(loader)


def test_a_dead_worker_is_an_error_and_no_hang(loader_of):
    loader = loader_of(num_workers=1, augment=lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(RuntimeError, match="worker"):
        read(loader)


@pytest.mark.full
def test_a_full_shared_memory_is_named_with_what_is_free():
    """In a mount namespace of its own, with four pages of memory in the place of /dev/shm."""
    script = (
        "import os; os.chdir('/'); from flowtrain_lightning.data.loading.workers import telling_full_memory\n"
        "import multiprocessing\n"
        "with telling_full_memory(2): [multiprocessing.Lock() for _ in range(64)]"
    )
    shell = (
        "mount -t tmpfs -o size=16k tmpfs /dev/shm && head -c 16384 /dev/zero > /dev/shm/full; exec "
        f"{sys.executable} -c {shlex.quote(script)}"
    )
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", shell],
        env={**os.environ, "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        timeout=300,
    )
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip("this machine lets nobody mount")
    assert "DataError: The loader's worker processes (2) cannot be started" in done.stderr, done.stderr
    assert "of whose 16,384 bytes 0 are free" in done.stderr
