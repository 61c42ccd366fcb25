import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch

from flowtrain_lightning.data import FlowDataModule, StepPart
from flowtrain_lightning.data.planning import CostChange
from flowtrain_lightning.data.steps import StepDataset
from flowtrain_lightning.packing import CostModel
from tests.data.support import data_module, write_set

TOKENS = {"semantics": "tokens", "microbatches": 2, "max_delay": 2}
WORKERS = pytest.mark.parametrize("workers", [0, 2])


@pytest.fixture
def loader_of(tmp_path):
    """Builds loaders of five steps; ends their workers afterwards."""
    file = write_set(tmp_path / "d.jsonl", 20)
    modules = []

    def build(**changes):
        data = data_module(file, **changes)
        modules.append(data)
        data.setup("fit")
        return data.train_dataloader()

    yield build
    for data in modules:
        data.teardown()


def named(batches):
    return [(batch.epoch, batch.step, batch.plan.samples.tolist()) for batch in batches]


def read(loader, epoch=0, count=None):
    loader.sampler.set_epoch(epoch)
    iterator = iter(loader)
    return named(next(iterator) for _ in range(count)) if count is not None else named(iterator)


@WORKERS
def test_an_epoch_has_the_steps_that_the_length_promises(loader_of, workers):
    loader = loader_of(num_workers=workers)
    batches = read(loader)
    assert len(loader) == len(batches) == 5
    assert [step for _, step, _ in batches] == [0, 1, 2, 3, 4]
    assert sorted(sample for *_, samples in batches for sample in samples) == list(range(20))
    assert batches != read(loader, epoch=1)
    assert batches == read(loader, epoch=0)


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


def test_an_iterator_reads_the_epoch_that_is_set_when_its_first_batch_is_asked_for(loader_of):
    loader = loader_of()
    iterator = iter(loader)
    loader.sampler.set_epoch(2)
    assert next(iterator).epoch == 2


@WORKERS
def test_steps_of_microbatches_are_the_same_with_workers_and_without(loader_of, workers):
    loader = loader_of(num_workers=workers, **TOKENS)
    epochs = [read(loader, epoch) for epoch in (0, 1, 0)]
    assert [len(epoch) for epoch in epochs] == [len(loader)] * 3
    assert epochs == [read(loader_of(**TOKENS), epoch) for epoch in (0, 1, 0)]


@WORKERS
@pytest.mark.parametrize("delivered", [0, 1, 3])
def test_a_saved_place_among_microbatches_gives_exactly_the_remaining_batches(loader_of, workers, delivered):
    first = loader_of(num_workers=workers, **TOKENS)
    whole = [read(loader_of(**TOKENS), epoch) for epoch in (0, 1, 2)]
    read(first, epoch=0)
    assert read(first, epoch=1, count=delivered) == whole[1][:delivered]
    state = json.loads(json.dumps(first.state_dict()))
    second = loader_of(num_workers=workers, **TOKENS)
    second.load_state_dict(state)
    assert second.state_dict() == state
    if delivered:
        assert read(second, epoch=1) == whole[1][delivered:]
    assert read(second, epoch=2) == whole[2]


def test_a_place_among_microbatches_does_not_depend_on_this_runs_ranks(loader_of, monkeypatch):
    whole = read(loader_of(**TOKENS))
    first = loader_of(**TOKENS)
    read(first, count=1)
    state = first.state_dict()
    monkeypatch.setattr(FlowDataModule, "_part", lambda _: StepPart.plain(0, 2))
    second = loader_of(**TOKENS)
    assert second.state_dict()["settings"]["row_width"] == 2
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert state["settings"]["row_width"] == 1
    assert read(second) == whole[1:]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"token_budget": 66}, "token_budget was 64, is 66"),
        ({"microbatches": 4}, "microbatches was 2, is 4"),
        ({"max_delay": 3}, "max_delay was 2, is 3"),
        ({"row_width": 2}, "row_width was 1, is 2"),
        ({"cost": CostModel(1.0, 2.0, 0.0)}, "cost was .*, is .*2.0"),
        ({"semantics": "samples", "microbatches": None}, "now: semantics was tokens, is samples. Use"),
    ],
)
def test_a_place_among_other_microbatches_is_refused(loader_of, change, words):
    state = loader_of(**TOKENS).state_dict()
    with pytest.raises(ValueError, match=words):
        loader_of(**(TOKENS | change)).load_state_dict(state)


ATTENTION = CostModel(0.0, 1.0, 0.0)


def packed(batches):
    return [[[m.tolist() for m in of_rank] for of_rank in batch.plan.microbatches] for batch in batches]


@pytest.fixture
def uneven(loader_of, monkeypatch):
    """Builds loaders of steps whose packing on two ranks depends on the cost model."""
    monkeypatch.setattr(FlowDataModule, "_part", lambda _: StepPart.plain(0, 2))
    return lambda **changes: loader_of(global_batch_size=10, **changes)


@WORKERS
def test_costs_change_in_the_step_that_was_named_and_not_before(uneven, workers):
    plain = packed(uneven(cost=CostModel(1.0, 0.0, 0.0)))
    attentive = packed(uneven(cost=ATTENTION))
    assert all(one != other for one, other in zip(plain, attentive, strict=True))
    loader = uneven(cost=CostModel(1.0, 0.0, 0.0), num_workers=workers)
    loader.change_costs(CostChange(0, 1, ATTENTION, None))
    assert packed(loader) == [plain[0], attentive[1]]
    assert named(loader) == named(uneven())
    later = uneven(num_workers=workers)
    later.load_state_dict(loader.state_dict())
    loader.sampler.set_epoch(1)
    later.sampler.set_epoch(1)
    assert packed(loader) == packed(later)


@WORKERS
def test_a_change_that_comes_too_late_is_refused(loader_of, workers):
    loader = loader_of(num_workers=workers)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(ValueError, match="step 0 of epoch 0, but what holds in step"):
        loader.change_costs(CostChange(0, 0, ATTENTION, None))
    loader.change_costs(CostChange(0, 2 + loader.planned_ahead, ATTENTION, None))
    with pytest.raises(ValueError, match="name a later step"):
        loader.change_costs(CostChange(0, 1 + loader.planned_ahead, ATTENTION, None))


def test_a_state_keeps_the_changes_that_matter_still(loader_of):
    loader = loader_of()
    costs = [CostModel(float(number), 1.0, 0.0) for number in range(4)]
    read(loader)
    for number, place in enumerate([(1, 0), (1, 1), (1, 3)]):
        loader.change_costs(CostChange(*place, costs[number], None))
    read(loader, epoch=1)
    loader.change_costs(CostChange(2, 2, costs[3], costs[0]))
    state = json.loads(json.dumps(loader.state_dict()))
    assert [(change["epoch"], change["step"]) for change in state["changes"]] == [(1, 3), (2, 2)]
    second = loader_of()
    second.load_state_dict(state)
    assert second.state_dict() == state
    given = loader_of(cost=ATTENTION)
    given.load_state_dict(state)
    assert given.state_dict()["changes"] == []


@WORKERS
@pytest.mark.parametrize("delivered", [0, 2, 5])
def test_a_saved_place_gives_exactly_the_remaining_batches(loader_of, workers, delivered):
    first = loader_of(num_workers=workers)
    whole = read(loader_of(), epoch=1)
    assert read(first, epoch=1, count=delivered) == whole[:delivered]
    second = loader_of(num_workers=workers)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert read(second, epoch=1 if delivered else 0) == (whole[delivered:] if delivered else read(loader_of()))
    assert second.state_dict()["step"] == 5


def test_a_place_in_another_epoch_begins_the_epoch_afresh(loader_of):
    first, second = loader_of(), loader_of()
    read(first, epoch=0)
    second.load_state_dict(first.state_dict())
    assert read(second, epoch=1) == read(loader_of(), epoch=1)


def test_a_place_is_used_once(loader_of):
    loader = loader_of()
    loader.load_state_dict({**loader.state_dict(), "step": 3})
    assert len(read(loader)) == 2
    assert len(read(loader)) == 5


@WORKERS
def test_what_was_loaded_ahead_does_not_count_as_delivered(loader_of, workers):
    loader = loader_of(num_workers=workers)
    iterator = iter(loader)
    batch = next(iterator)
    ahead = [batch.following(distance) for distance in (1, 3, 2)]
    assert [each.step for each in ahead] == [1, 3, 2]
    assert loader.state_dict()["step"] == 1
    assert next(iterator) is ahead[0]
    assert ahead[0].following(1) is ahead[2]
    assert batch.following(4).step == 4
    assert batch.following(5) is None
    with pytest.raises(LookupError, match="Step 1 was delivered already"):
        batch.following(1)
    assert [each.step for each in iterator] == [2, 3, 4]
    assert batch.following(9) is None


def test_a_batch_does_not_keep_its_loader_busy(loader_of):
    batch = next(iter(loader_of()))
    gc.collect()
    assert batch.following(1) is None


def test_of_two_iterators_the_later_one_is_in_use(loader_of):
    loader = loader_of(num_workers=1)
    first = iter(loader)
    next(first)
    second = iter(loader)
    assert next(second).step == 0
    with pytest.raises(RuntimeError, match="ended when another one"):
        next(first)
    assert [batch.step for batch in second] == [1, 2, 3, 4]


@WORKERS
def test_an_epoch_may_be_left_early(loader_of, workers):
    loader = loader_of(num_workers=workers)
    read(loader, epoch=0, count=2)
    assert read(loader, epoch=1) == read(loader_of(), epoch=1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 4}, "seed was 3, is 4"),
        ({"global_batch_size": 5}, "global_batch_size was 4, is 5"),
        ({"shuffle": False}, "shuffle was True, is False"),
        ({"token_budget": 28, "too_long": "drop"}, "files was"),
    ],
)
def test_a_place_among_other_samples_is_refused(loader_of, change, words):
    state = loader_of().state_dict()
    with pytest.raises(ValueError, match=words):
        loader_of(**change).load_state_dict(state)


def test_what_does_not_move_samples_may_change(loader_of):
    state = {**loader_of().state_dict(), "step": 2}
    loader = loader_of(token_budget=100, pad_to_budget=True, num_workers=1)
    loader.load_state_dict(state)
    assert read(loader) == read(loader_of())[2:]


@WORKERS
def test_loading_leaves_the_random_stream_of_the_model_alone(loader_of, workers):
    loader = loader_of(num_workers=workers)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    read(loader)
    assert torch.rand(1) == expected


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


def children():
    return {child.pid for child in psutil.Process().children(recursive=True)}


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
