"""Producers of Ray: they make the steps that local loading makes, lose none when they die, and leave nothing behind."""

import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from flowtrain_lightning.data import DataError
from flowtrain_lightning.data.producers import producers
from tests.data.ray_runs import are_equal, epoch_of, listening, processes_of_ray, produced, producers_alive
from tests.data.support import TOKEN_STEPS, data_module, read

VERSIONS = producers.versions()


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


def test_steps_are_equal_to_the_bit_and_nothing_of_ray_is_left(file, monkeypatch):
    local = data_module(file)
    local.setup("fit")
    with produced(file, num_workers=1) as (loader, _):
        assert are_equal(local.train_dataloader(), loader)
        assert loader.planned_ahead == 2
        of_ray = processes_of_ray()
        words = [word for process in of_ray for word in process.cmdline()[-1].split('"')]
        folder = next(Path(word).parent for word in words if word.startswith("/") and "/flowtrain-" in word)
        assert folder.stat().st_mode & 0o777 == 0o700
        assert listening(of_ray) == {"127.0.0.1"}
    assert psutil.wait_procs(of_ray, timeout=10)[1] == []
    assert not folder.exists()


def test_without_ray_one_sentence_says_what_to_install(monkeypatch, file):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"needs Ray, which is not installed: pip install .*ray"):
        data_module(file, producers="ray")


def test_other_producers_are_refused(file):
    with pytest.raises(ValueError, match="producers='spark'; give 'ray' or None"):
        data_module(file, producers="spark")


@pytest.mark.full
def test_producers_that_die_lose_nothing(loader_of, tmp_path):
    whole = [step for epoch in range(4) for step in epoch_of(loader_of(token_steps=TOKEN_STEPS), epoch)]
    with produced(tmp_path / "d.jsonl", token_steps=TOKEN_STEPS) as (loader, _):
        found, killed = [], 0
        for epoch in range(4):
            for step in epoch_of(loader, epoch):
                found.append(step)
                for producer in producers_alive()[: len(found) % 3 == 0]:
                    producer.kill()
                    killed += 1
    assert killed > 2
    assert are_equal(whole, found)


@pytest.mark.full
def test_a_position_gives_exactly_the_remaining_steps_whoever_makes_them(loader_of, tmp_path):
    whole = list(epoch_of(loader_of(token_steps=TOKEN_STEPS), 1))
    with produced(tmp_path / "d.jsonl", token_steps=TOKEN_STEPS) as (loader, _):
        read(loader, epoch=1, count=2)
        state = loader.state_dict()
        loader.load_state_dict(state)
        assert are_equal(whole[2:], epoch_of(loader, 1))
    local = loader_of(token_steps=TOKEN_STEPS)
    local.load_state_dict(state)
    assert are_equal(whole[2:], epoch_of(local, 1))


@pytest.mark.full
def test_an_error_in_a_producer_names_file_and_record(file):
    with produced(file, num_workers=1) as (loader, _):
        for image in (file.parent / "images").iterdir():
            image.write_bytes(b"")
        with pytest.raises(DataError, match=r"d\.jsonl, record \d+ .*was rewritten"):
            read(loader)


@pytest.mark.full
def test_other_versions_than_the_ranks_are_refused(file, monkeypatch):
    monkeypatch.setattr(producers, "versions", lambda: {**VERSIONS, "pillow": "1.7.8"})
    with produced(file, num_workers=1) as (loader, _), pytest.raises(DataError, match=r"pillow .*\(rank: 1\.7\.8\)"):
        read(loader)


def kill_this_process(*_):
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.full
def test_records_that_kill_each_producer_are_named(file):
    with (
        produced(file, num_workers=1, augment=kill_this_process) as (loader, _),
        pytest.raises(DataError, match=r"could not make step 0 of epoch 0 \(.*d\.jsonl, record \d+"),
    ):
        read(loader)


def never_made(*_):
    time.sleep(1e6)


@pytest.mark.full
def test_a_step_that_takes_too_long_is_named_with_its_records_and_ends_the_run(file, monkeypatch, caplog):
    monkeypatch.setattr(producers, "SLOW_SECONDS", 2.0)
    monkeypatch.setattr(producers, "LONGEST_SECONDS", 20.0)
    step = r"Producers have not made step 0 of epoch 0 \(.*d\.jsonl, record \d+; .*\) within {} s\."
    with (
        produced(file, num_workers=1, augment=never_made) as (loader, _),
        pytest.raises(DataError, match=step.format(r"2\d") + r".*The run ends here; leave slow records out"),
    ):
        read(loader)
    assert re.search(step.format("2"), caplog.text)
