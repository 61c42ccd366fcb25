"""The way of a platform engineer, by recipes/several_nodes/README.md alone: plan, nodes, going on, W&B, export."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch

from flowtrain_lightning.allocator.plan_file import read_plan
from tests.paths import ROOT
from tests.ports import free_port
from tests.recipes.test_several_nodes import stand_in
from tests.ways.pasting import adapted, commands, run

PAGE = "recipes/several_nodes/README.md"
SLURM, TORCHRUN = commands(PAGE)
(PLAN,) = re.findall(r"`(flowtrain plan .*?)`", (ROOT / PAGE).read_text(encoding="utf-8"))

SMALL = (
    " --model.init_args.encoder_depth 1 --model.init_args.backbone_depth 1 --trainer.limit_val_batches 1"
    " --trainer.val_check_interval 1 --trainer.callbacks.init_args.dirpath runs/kept"
)
"""A few steps in place of a training."""

IN_RUN = " --trainer.logger.offline true --trainer.logger.id my-run"
"""What docs/watching.md says of nodes without network, and of going on in the same run."""

pytestmark = pytest.mark.full


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A folder with the recipes, to train in."""
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    return tmp_path


def test_the_plan_s_last_lines_are_a_command_that_training_takes(clone):
    said = run(clone, f"{PLAN} --out plan.yaml")
    assert read_plan(clone / "plan.yaml").size == 64
    (command,) = re.findall(r"flowtrain fit .*", said)
    typed = adapted(command, {"config.yaml ": "recipes/qwen_vl/config.yaml "})
    config = run(clone, f"{typed} --print_config")
    assert "allocation: plan.yaml" in config
    assert "num_nodes: 8" in config


def test_the_script_for_slurm_starts_every_task_on_the_nodes_that_were_asked_for(clone):
    stand_in(clone, "srun", f'printf "%s\\n" "$@" > {clone}/tasks')
    stand_in(
        clone,
        "sbatch",
        'for word; do case "$word" in --nodes=*) nodes=${word#*=};; *.sh) break;; esac; shift; done\n'
        'SLURM_NNODES=$nodes SLURM_NTASKS_PER_NODE=8 SLURM_JOB_ID=1 "$@"',
    )
    run(clone, f"export PATH={clone}:$PATH; {SLURM}")
    started = (clone / "tasks").read_text().splitlines()
    assert started[started.index("flowtrain") :][-2:] == ["--trainer.num_nodes=4", "--trainer.devices=8"]
    config = run(clone, f"{shlex.join(started[started.index('flowtrain') :])} --print_config")
    assert "shard: fsdp" in config


def test_two_nodes_train_go_on_in_the_same_run_of_wandb_and_export(clone):
    pytest.importorskip("wandb")
    (logged,) = (line for line in commands("recipes/quickstart/README.md", "Variants") if "WandbLogger" in line)
    options = logged.partition("--config recipes/quickstart/config.yaml")[2]
    own = {
        "NODES=8 MASTER=10.0.0.1": f"NODES=2 GPUS=1 PORT={free_port()} MASTER=127.0.0.1",
        "qwen_vl/config.yaml --config recipes/qwen_vl/64-gpus.yaml": "quickstart/config.yaml",
    }
    node = adapted(TORCHRUN, own) + SMALL + options + IN_RUN + " --ckpt_path last --trainer.max_steps "
    said = {}
    for steps in ("2", "4"):
        first, second = node + steps, adapted(node, {"torchrun.sh 0": "torchrun.sh 1"}) + steps
        said[steps] = run(clone, f"{second} & {first}; wait $!")
    assert "so training begins from the start" in said["2"]
    assert 'ckpt_path="last" is ' in said["4"]
    assert ", saved after step 2 in epoch 0." in said["4"]
    runs = list((clone / "runs").rglob("run-my-run.wandb"))
    assert len(runs) == 2, "one start each, which `wandb sync` joins"
    run(clone, "flowtrain export runs/kept/last.ckpt out.ckpt")
    assert torch.load(clone / "out.ckpt", weights_only=True)["global_step"] == 4
