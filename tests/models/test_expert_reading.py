"""Of a published folder a rank reads its share of the experts, and no more, whichever way round they are saved."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import flowtrain_lightning as flow
from flowtrain_lightning.parallel.connecting import disconnect_groups
from flowtrain_lightning.parallel.unfilled_weights import UnfilledWeights
from tests.exactness.data import steps_data, write_steps
from tests.exactness.layouts import trainer_for
from tests.forks import Job, run_jobs
from tests.models.tiny import FAMILIES

transformers = pytest.importorskip("transformers")

QWEN = FAMILIES["qwen3_vl_moe"]
ALMOST_ALL_EXPERTS = {"num_experts": 32, "moe_intermediate_size": 512, "hidden_size": 64, "head_dim": 16}
SHARE = 1.1
"""Of what a rank holds it reads so much at most: a page that is touched comes with those around it."""


def publish(folder: Path, *, turned: bool) -> None:
    """Writes a folder as of Hugging Face, in several files; ``turned`` as Qwen3-VL's are published."""
    text, vision = (QWEN.config[f"{half}_config"] for half in ("text", "vision"))
    sizes = {"text_config": text | ALMOST_ALL_EXPERTS, "vision_config": vision | {"out_hidden_size": 64}}
    config = transformers.AutoConfig.for_model(**{**QWEN.config, **sizes})
    model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="5MB")
    for path in folder.glob("*.safetensors") if turned else ():
        saved = load_file(path)
        saved |= {name: saved[name].mT.contiguous() for name in saved if ".experts." in name}
        save_file(saved, path, metadata={"format": "pt"})


def mapped_bytes() -> int:
    """Bytes of files of weights that this process has looked at, and still has open."""
    total, is_of_weights = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_of_weights = line.endswith(".safetensors")
        elif is_of_weights and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


def train(folder: Path, *, data: str, model: str, backbone: dict[str, Any]) -> None:
    """Trains a step; every rank writes down what it has read, and what it holds."""
    read = []

    class Counted(UnfilledWeights):
        """Counts when weights have been filled."""

        def fill(self, *args: Any, **settings: Any) -> None:
            super().fill(*args, **settings)
            read.append(mapped_bytes())

    UnfilledWeights.fill = Counted.fill  # type: ignore[method-assign]
    trainer = trainer_for(
        "colocated 2",
        strategy={"roles": {"backbone": backbone, "encoder": {"shard": "fsdp"}}},
        max_steps=1,
        limit_val_batches=0,
        default_root_dir=folder,
    )
    module = flow.models.QwenVLM(model)
    trainer.fit(module, datamodule=steps_data(Path(data), images=QWEN.images, token_budget=160))
    held = sum(getattr(each, "to_local", lambda each=each: each)().numel() for each in module.parameters())
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps({"read": max(read), "held": 2 * held}))
    disconnect_groups()


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="what is read is told by /proc")
@pytest.mark.parametrize("turned", [False, True], ids=["as they are", "turned"])
@pytest.mark.parametrize("backbone", [{"expert": 2}, {"expert": 2, "shard": "fsdp"}], ids=str)
def test_a_rank_reads_its_share_of_the_experts(tmp_path, backbone, turned):
    publish(tmp_path / "model", turned=turned)
    write_steps(tmp_path / "data")
    arguments = {"data": str(tmp_path / "data"), "model": str(tmp_path / "model"), "backbone": backbone}
    folder = run_jobs(tmp_path, [Job("train", f"{__name__}:train", 2, arguments)])["train"].check().folder
    whole = sum(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors"))
    for rank in (json.loads((folder / f"rank{number}.json").read_text()) for number in range(2)):
        assert rank["held"] < 0.6 * whole
        assert 0.9 * rank["held"] <= rank["read"] <= SHARE * rank["held"]
