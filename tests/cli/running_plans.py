"""Ranks that train the tiny module on one plan after another, in the same processes."""

from __future__ import annotations

from pathlib import Path

import lightning as L

import flowtrain_lightning as flow
from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from tests.exactness.drawing import Drawing, drawings, write_drawings
from tests.exactness.hearing import memory_data, module_of
from tests.exactness.mixture import Mixture
from tests.exactness.modules import Deep, Divided
from tests.forks import write_down
from tests.tiny import WIDTH, Block, TinyVLM, tiny_data


class Deeper(Deep):
    """Both halves have four repeated blocks."""

    def configure_encoder(self) -> None:
        super().configure_encoder()
        self.encoder.more.append(Block(WIDTH))


def train_on_plans(
    folder: Path,
    *,
    data: str,
    plans: list[str],
    ranks: int,
    divides: bool = False,
    hears: bool = False,
    deep: bool = False,
    draws: bool = False,
    mixes: bool = False,
) -> None:
    """Writes down on which allocation each plan has trained, and for how many steps.

    Args:
        folder: of this rank.
        data: folder of the records.
        plans: files.
        ranks: of the run.
        divides: the module has layers that tensor ranks divide, and sequences that context ranks share.
        hears: it has an encoder of audio beside that of images.
        deep: it has as many repeated blocks as stages may want.
        draws: it has a generator; its encoder, and all of its backbone but queries, are frozen.
        mixes: its halves have mixtures of as many experts as there are ranks.
    """
    kind: type[TinyVLM] = Divided if divides else Deeper if deep else Mixture if mixes else TinyVLM
    if hears:
        kind = module_of(divided=divides)
    if draws:
        write_drawings(folder / "drawings")
    trained = {}
    for plan in plans:
        strategy = flow.FlowTrainStrategy(allocation=plan)
        trainer = L.Trainer(
            accelerator="cpu",
            devices=ranks,
            strategy=strategy,
            max_steps=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder / Path(plan).stem,
        )
        if draws:
            trainer.fit(Drawing(("encoder", "backbone"), divided=divides), drawings(folder / "drawings"))
        else:
            trainer.fit(kind(), datamodule=memory_data() if hears else tiny_data(Path(data)))
        trained[plan] = {"allocation": strategy.allocation.state_dict(), "steps": trainer.global_step}
    write_down(folder, trained)
    disconnect_groups()
