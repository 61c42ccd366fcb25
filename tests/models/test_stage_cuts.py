"""The stages that a plan counts on are those into which the built model is cut."""

from __future__ import annotations

import pytest
import torch

from flowtrain_lightning.allocator import DEVICES, Cluster, named_model, role_problems, typical_workload
from flowtrain_lightning.allocator.public_models import CONFIGS
from flowtrain_lightning.allocator.stage_layers import layers_of_chunks
from flowtrain_lightning.packing.stage_schedule import Schedule, StageSchedule
from flowtrain_lightning.parallel.stages.stage_cut import cut_half

transformers = pytest.importorskip("transformers")

from flowtrain_lightning.models.pretrained import module_class  # noqa: E402

PIPELINES: tuple[tuple[int, int, Schedule], ...] = ((2, 1, "1f1b"), (4, 1, "1f1b"), (8, 1, "1f1b"), (2, 2, "zb-v"))


@pytest.mark.parametrize("name", ["qwen2-vl-2b", "qwen2.5-vl-7b", "qwen2.5-vl-72b", "qwen3-vl-8b", "llava-1.5-7b"])
def test_plan_and_run_divide_the_layers_of_a_public_model_alike(name):
    given = {key: value for key, value in CONFIGS[name].items() if key != "model_type"}
    config = transformers.CONFIG_MAPPING[CONFIGS[name]["model_type"]](**given)
    module = module_class(config.model_type)(config)
    with torch.device("meta"):
        module.configure_model()
    described = named_model(name)
    cluster = Cluster(DEVICES["h100"], 8, 8)
    problem = role_problems(described, typical_workload(described), cluster, "bf16-mixed")["backbone"]
    for settings in PIPELINES:
        pipeline = StageSchedule(*settings)
        cuts = [cut_half(module, "backbone", stage, pipeline) for stage in range(pipeline.stages)]
        runs = sorted((chunk.start, len(chunk)) for cut in cuts for chunk in cut.chunks)
        assert layers_of_chunks(problem, pipeline) == tuple(length for _, length in runs)
