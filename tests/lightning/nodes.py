"""What ranks do on two hosts, or on one: a short run of the tiny module under a real Trainer.

As a script, ``nodes.py FOLDER DATA [ENCODER_RANKS]``: for whatever launches it on both hosts.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import flowtrain_lightning as flow
from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from tests.exactness.data import STEPS, steps_data
from tests.exactness.layouts import SEED
from tests.exactness.train import Recorder
from tests.hosts import ADDRESSES, enter, own_disk, own_interfaces
from tests.tiny import TinyVLM

RANKS = 4
PORT = "29519"


class Save(L.Callback):
    """Saves ``saved.ckpt`` after some step."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


class Die(L.Callback):
    """One rank is killed after some step."""

    def __init__(self, rank: int, step: int) -> None:
        self.rank = rank
        self.step = step

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if (trainer.global_rank, trainer.global_step) == (self.rank, self.step):
            (Path(str(trainer.default_root_dir)) / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)


def go_to_host(tester: int, started_by: str = "hand") -> int:
    """Moves this rank to its one of the two hosts of a process, which is returned, with a launcher's variables.

    Args:
        tester: the process that has made the hosts.
        started_by: ``"hand"``, a script for each rank; or ``"srun"``, SLURM's command.
    """
    rank = os.environ["RANK"]
    node, local = divmod(int(rank), RANKS // 2)
    enter(node, tester)
    if started_by == "hand":
        place = {"LOCAL_RANK": str(local), "NODE_RANK": str(node), "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": PORT}
    else:
        for name in ("LOCAL_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"):
            del os.environ[name]
        job = {"JOB_ID": "4711", "JOB_NAME": "train", "NODELIST": ",".join(ADDRESSES)}
        size = {"NTASKS": str(RANKS), "NNODES": "2", "NTASKS_PER_NODE": str(RANKS // 2)}
        own = {"PROCID": rank, "LOCALID": str(local), "NODEID": str(node)}
        place = {f"SLURM_{name}": value for name, value in {**job, **size, **own}.items()}
    os.environ |= place
    return node


def trainer_for(nodes: int, strategy: Any, **settings: Any) -> L.Trainer:
    """A quiet Trainer of four ranks on so many nodes."""
    quiet: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    bounds = {"max_steps": STEPS, "limit_val_batches": 0, "num_sanity_val_steps": 0, "enable_checkpointing": False}
    L.seed_everything(SEED, verbose=False)
    return L.Trainer(
        accelerator="cpu",
        devices=RANKS // nodes,
        num_nodes=nodes,
        strategy=strategy,
        **{**quiet, **bounds, "precision": "64-true", **settings},
    )


def train(
    folder: Path,
    *,
    data: str,
    strategy: dict[str, Any],
    nodes: int = 1,
    tester: int | None = None,
    started_by: str = "hand",
    save_at: int | None = None,
    resume: str | None = None,
    dies: tuple[int, int] | None = None,
) -> None:
    """Trains and writes ``rank<r>.pt``, on the hosts of process ``tester`` or, without one, here."""
    if tester is not None:
        go_to_host(tester, started_by)
        if "pool" in strategy:
            own_interfaces()
    recorder = Recorder()
    callbacks: list[L.Callback] = [recorder]
    if save_at is not None:
        callbacks.append(Save(folder / "saved.ckpt", save_at))
    if dies is not None:
        callbacks.append(Die(*dies))
    trainer = trainer_for(
        nodes, flow.FlowTrainStrategy(**strategy, hang_timeout=60), callbacks=callbacks, default_root_dir=folder
    )
    trainer.fit(TinyVLM(), steps_data(Path(data)), ckpt_path=resume)
    recorder.save(folder)
    disconnect_groups()


def train_on_other_data(folder: Path, *, data: str, tester: int) -> None:
    """The second host has a word of its own in one answer."""
    own = Path(data)
    if go_to_host(tester) == 1:
        own = folder / f"data{os.environ['RANK']}"
        shutil.copytree(data, own)
        text = (own / "train.jsonl").read_text()
        (own / "train.jsonl").write_text(text.replace("small", "large"))
    trainer_for(2, flow.FlowTrainStrategy(encoder_ranks=2, hang_timeout=60), default_root_dir=folder).fit(
        TinyVLM(), steps_data(own)
    )


def train_without_a_shared_folder(folder: Path, *, data: str, tester: int, checks_at_start: bool) -> None:
    """Saves into a folder in whose place the second host has a disk of its own."""
    kept = folder / "kept"
    kept.mkdir(exist_ok=True)
    if go_to_host(tester) == 1:
        own_disk(kept)
    callback = ModelCheckpoint(kept, every_n_train_steps=2) if checks_at_start else Save(kept / "a.ckpt", 2)
    trainer = trainer_for(
        2,
        flow.FlowTrainStrategy(encoder_ranks=2, hang_timeout=60),
        callbacks=[callback],
        default_root_dir=folder,
        enable_checkpointing=checks_at_start,
    )
    try:
        trainer.fit(TinyVLM(), steps_data(Path(data)))
    finally:
        deadline = time.monotonic() + 10  # rank 0 clears away what it wrote while the others end already
        while any(kept.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.05)
        found = {"step": trainer.global_step, "left": sorted(path.name for path in kept.iterdir())}
        torch.save(found, folder / f"rank{os.environ['RANK']}.pt")


def main() -> None:
    """Trains on two nodes and writes ``rank<r>.pt``, and what was settled into ``settled<r>.json``."""
    folder, data, *encoder_ranks = sys.argv[1:]
    said = {"encoder_ranks": int(encoder_ranks[0])} if encoder_ranks else {}
    strategy = flow.FlowTrainStrategy(**said, hang_timeout=60, timeout=120)
    recorder = Recorder()
    trainer = trainer_for(2, strategy, callbacks=[recorder], default_root_dir=folder)
    trainer.fit(TinyVLM(), steps_data(Path(data)))
    os.environ["RANK"] = str(trainer.global_rank)  # by which `Recorder` names its file
    recorder.save(Path(folder))
    settled = {
        "ranks": trainer.strategy.allocation.state_dict()["ranks"],
        "reason": trainer.strategy.placement_decision.reason,
    }
    Path(folder, f"settled{trainer.global_rank}.json").write_text(json.dumps(settled))
    disconnect_groups()


if __name__ == "__main__":
    main()
