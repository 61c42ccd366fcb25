"""Ranks read of a published folder's files what they hold: their experts, whichever way round, or their stage."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.exactness.data import write_steps
from tests.exactness.layouts import ranks_of
from tests.forks import Job, read_down, run_jobs
from tests.models.tiny import FAMILIES

pytest.importorskip("transformers")
from safetensors.torch import load_file, save_file

EXPERTS = 16


def published(folder: Path, *, turned: bool = False, **settings: int) -> tuple[int, int]:
    """A model in several files, nearly all of which are experts; the bytes of these, and of the rest."""
    family = FAMILIES["qwen3_vl_moe"]
    text = {**family.config["text_config"], "num_experts": EXPERTS, "moe_intermediate_size": 2048, **settings}
    module = family.kind({**family.config, "text_config": text})
    module.configure_model()
    module.model.save_pretrained(folder, max_shard_size="10MB")
    sizes = [0, 0]
    for path in folder.glob("*.safetensors"):
        stored = load_file(path)
        for name, weight in stored.items():
            sizes[".experts." not in name] += weight.nbytes
        if turned:
            stored = {n: w.mT.contiguous() if ".experts." in n else w for n, w in stored.items()}
            save_file(stored, path, {"format": "pt"})
    assert len(list(folder.glob("*.safetensors"))) > 2
    return sizes[0], sizes[1]


@pytest.mark.full
@pytest.mark.parametrize("turned", [False, True], ids=["as they compute", "the other way round"])
@pytest.mark.parametrize(
    ("layout", "backbone"),
    [
        ("colocated 2", {"expert": 2}),
        ("1+4", {"expert": 2, "shard": "fsdp"}),
        ("1+4", {"expert": 2, "tensor": 2, "shard": "fsdp"}),
        ("1+1", {}),
    ],
    ids=str,
)
def test_a_rank_reads_its_share_of_the_experts_and_none_without_their_half(tmp_path, layout, backbone, turned):
    experts, rest = published(tmp_path / "model", turned=turned)
    write_steps(tmp_path / "data")
    given = {"data": str(tmp_path / "data"), "model": str(tmp_path / "model"), "layout": layout}
    job = Job("parts", "tests.models.reading_parts:train", ranks_of(layout), {**given, "roles": {"backbone": backbone}})
    seen = read_down(run_jobs(tmp_path, [job])["parts"].check().folder)
    assert not any(rank["differ"] for rank in seen)
    ranks = {"colocated 2": 2, "1+4": 4, "1+1": 1}[layout]
    sharing = [rank["read"] for rank in seen if rank["has_experts"]]
    assert len(sharing) == ranks
    assert all(experts / ranks <= read <= experts / ranks + rest for read in sharing), (sharing, experts, rest)
    assert all(rank["read"] <= rest for rank in seen if not rank["has_experts"])


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "backbone"),
    [
        ("1+2", {"pipeline": 2}),
        ("1+4", {"pipeline": 2, "shard": "fsdp"}),
        ("1+2", {"pipeline": 2, "virtual": 2}),
        ("1+2", {"pipeline": 2, "schedule": "zb-v"}),
    ],
    ids=str,
)
def test_a_rank_reads_the_weights_of_its_stage_alone(tmp_path, layout, backbone):
    """Also of the embedding and the head, of which a stage has one, or in a V both or none."""
    published(tmp_path / "model", num_hidden_layers=4, moe_intermediate_size=1024, vocab_size=8192)
    write_steps(tmp_path / "data")
    given = {"data": str(tmp_path / "data"), "model": str(tmp_path / "model"), "layout": layout}
    job = Job("parts", "tests.models.reading_parts:train", ranks_of(layout), {**given, "roles": {"backbone": backbone}})
    seen = read_down(run_jobs(tmp_path, [job])["parts"].check().folder)
    assert not any(rank["differ"] for rank in seen)
    shards, of_stages = ranks_of(layout) // 2, [rank for rank in seen if rank["has_experts"]]
    assert len(of_stages) == 2 * shards
    assert [rank["read"] for rank in of_stages] == [rank["large"] // shards for rank in of_stages]
