"""Under plain Lightning a step computes what it computes alone, whatever this process did before."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from flowtrain_lightning.data import PackedBatch
from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from tests.exactness.data import steps_data, write_steps
from tests.exactness.layouts import trainer_for
from tests.forks import Job, read_down, run_jobs, write_down
from tests.tiny import TinyVLM, tiny_data, write_records


def ddp_after_flowtrain(folder: Path, *, data: str) -> None:
    """Writes what DDP says to the groups of roles, and what it trains once these are left."""

    def fit(layout: str) -> TinyVLM:
        module = TinyVLM()
        trainer = trainer_for(layout, max_steps=2, limit_val_batches=0, default_root_dir=folder)
        trainer.fit(module, datamodule=steps_data(Path(data)))
        return module

    told = ""
    fit("1+1")
    try:
        fit("ddp 2")
    except RuntimeError as error:
        told = str(error)
    dist.destroy_process_group()
    module = fit("ddp 2")
    weights = [float(parameter.double().abs().sum()) for parameter in module.parameters()]
    write_down(folder, {"told": told, "ranks": dist.get_world_size(), "weights": weights})
    dist.destroy_process_group()
    disconnect_groups()


def test_ddp_after_a_separate_run_is_refused_until_the_groups_of_the_roles_are_left(tmp_path):
    write_steps(tmp_path)
    job = Job("ddp", f"{__name__}:ddp_after_flowtrain", 2, {"data": str(tmp_path)})
    first, second = read_down(run_jobs(tmp_path, [job])["ddp"].check().folder)
    for rank in (first, second):
        assert rank["told"].startswith("This Trainer has 2 ranks, but torch.distributed's default group has 1:")
        assert "torch.distributed.destroy_process_group()" in rank["told"]
        assert rank["ranks"] == 2
    assert first["weights"] == second["weights"]


class FailsOnce(TinyVLM):
    """Its second microbatch of all fails."""

    microbatches = 0

    def loss(self, outputs: Tensor, batch: PackedBatch) -> tuple[Tensor, int]:
        self.microbatches += 1
        if self.microbatches == 2:
            raise KeyError("a mistake of the user")
        return super().loss(outputs, batch)


@pytest.mark.parametrize("run", ["fit", "validate"])
def test_a_run_after_a_failed_one_with_the_same_trainer_starts_with_an_empty_logbook(tmp_path, run):
    write_records(tmp_path, 8)
    write_records(tmp_path, 8, "val.jsonl")

    def numbers(module: TinyVLM, failures: int) -> dict[str, Tensor]:
        trainer = trainer_for("auto", max_steps=1, limit_val_batches=int(run == "validate"), default_root_dir=tmp_path)
        for _ in range(failures):
            with pytest.raises(KeyError, match="a mistake of the user"):
                getattr(trainer, run)(module, datamodule=tiny_data(tmp_path))
        getattr(trainer, run)(module, datamodule=tiny_data(tmp_path))
        weights = dict(module.named_parameters())
        return {**trainer.callback_metrics, "head": weights["backbone.head.weight"].detach()}

    after_a_failure, expected = numbers(FailsOnce(), 1), numbers(TinyVLM(), 0)
    assert after_a_failure.keys() == expected.keys()
    assert all(torch.equal(after_a_failure[name], expected[name]) for name in expected)
