"""Ranks whose steps producers make train to the same bits as ranks that load for themselves."""

from __future__ import annotations

import random
import time
from pathlib import Path

import lightning as L
import pytest

from tests.data.ray_runs import producers_alive
from tests.exactness.compare import read_run, same_bits
from tests.exactness.data import steps_data, write_steps
from tests.exactness.layouts import ranks_of, trainer_for
from tests.exactness.train import weights_of
from tests.forks import Job, read_down, run_jobs, write_down
from tests.tiny import TinyVLM

pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]

STEPS, KILLS = 300, 20


@pytest.mark.parametrize("layout", ["1+2", "ddp 2"])
def test_losses_and_weights_are_equal_to_the_bit(tmp_path, layout, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    write_steps(tmp_path / "data")
    jobs = [
        Job(
            name,
            "tests.exactness.train:train",
            ranks_of(layout),
            {"data": str(tmp_path / "data"), "layout": layout, "settings": settings},
        )
        for name, settings in (("local", {}), ("produced", {"producers": "ray", "num_workers": 1}))
    ]
    done = run_jobs(tmp_path, jobs)
    local, produced = (read_run(done[name].check().folder) for name in ("local", "produced"))
    assert local.losses == produced.losses
    assert same_bits(local, produced)


class Losses(L.Callback):
    """Keeps the loss of each step, and kills a producer after some.

    Args:
        kills: the steps, by number.
    """

    def __init__(self, kills):
        self.losses, self.killed, self._kills, self._choose = [], 0, set(kills), random.Random(7)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))
        if trainer.is_global_zero and trainer.global_step in self._kills:
            while not (alive := producers_alive()):
                time.sleep(0.1)
            self._choose.choice(alive).kill()
            self.killed += 1


def train_long(folder, *, data, kills, settings):
    """Trains, and has rank 0, which has started Ray, kill producers of both ranks; writes down what came of it."""
    callback = Losses(kills)
    trainer = trainer_for("1+1", max_steps=STEPS, limit_val_batches=0, callbacks=[callback], default_root_dir=folder)
    module = TinyVLM()
    trainer.fit(module, datamodule=steps_data(Path(data), **settings))
    weights = {name: value.tolist() for name, value in weights_of(module).items()}
    write_down(folder, {"losses": callback.losses, "weights": weights, "killed": callback.killed})


def test_twenty_producers_killed_at_random_in_300_steps_change_no_bit(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    write_steps(tmp_path / "data")
    kills = random.Random(40).sample(range(1, STEPS), KILLS)
    found = {}
    for name, steps, settings in (("local", [], {}), ("killed", kills, {"producers": "ray", "num_workers": 1})):
        arguments = {"data": str(tmp_path / "data"), "kills": steps, "settings": settings}
        job = Job(name, f"{__name__}:train_long", 2, arguments, deadline=1200.0)
        found[name] = read_down(run_jobs(tmp_path, [job])[name].check().folder)
    assert found["killed"][0].pop("killed") == KILLS
    for local, killed in zip(found["local"], found["killed"], strict=True):
        assert len(killed["losses"]) == STEPS
        assert local["losses"] == killed["losses"]
        assert local["weights"] == killed["weights"]
