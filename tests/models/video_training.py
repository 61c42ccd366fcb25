"""A training run on videos and images on any layout, as ranks of a job run it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flowtrain_lightning.data import KeepFeatures, PackingConfig
from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from tests.exactness.data import STEPS
from tests.exactness.layouts import trainer_for
from tests.exactness.train import Recorder
from tests.models.clips import video_data, video_family
from tests.models.training import SaveAfter


def train(
    folder: Path,
    *,
    data: str,
    layout: str,
    family: str,
    resumes: str | None = None,
    saves_after: int = STEPS,
    encoder_budget: int | None = None,
    context: int = 1,
    frozen: str = "",
    store: str | None = None,
) -> None:
    """Trains ``STEPS`` steps; every rank writes down what it computed, and ``middle.ckpt`` of a step."""
    tiny, recorder = video_family(family), Recorder()
    settings: dict[str, Any] = {"token_budget": 256}
    if encoder_budget is not None:
        settings["encoder_budget"] = encoder_budget
    if store is not None:
        settings["keep_features"] = KeepFeatures(store)
    if layout.startswith("mixed"):  # more to encode than the ranks can that only encode
        settings["packing"] = PackingConfig(media_costs={"encoder": CostModel(4.0, 0.0, 0.0)})
    strategy = {} if context == 1 else {"roles": {"backbone": {"context": context}}}
    trainer = trainer_for(
        layout,
        strategy=strategy,
        precision="64-true",
        max_steps=STEPS,
        limit_val_batches=0,
        callbacks=[recorder, SaveAfter(saves_after, folder / "middle.ckpt")],
        default_root_dir=folder,
    )
    module = tiny.kind(tiny.config, lr=1e-2, weight_decay=0.1, frozen=frozen or ())
    trainer.fit(module, datamodule=video_data(Path(data), family, **settings), ckpt_path=resumes or None)
    recorder.save(folder)
    disconnect_groups()
