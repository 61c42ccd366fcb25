"""The packing check on models of Hugging Face: none of ours is accused, and what packing would change is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import flowtrain_lightning as flow
from flowtrain_lightning.packing_check import report_of
from tests.models.foreign import FOREIGN
from tests.models.tiny import FAMILIES
from tests.tiny import tiny_data, write_records

pytestmark = pytest.mark.checks_packing

_QUICK = ("internvl", "gemma3")


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("records")
    write_records(folder, 16)
    return folder


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=() if name in _QUICK else pytest.mark.full) for name in FAMILIES],
)
def test_no_family_is_accused(records, family):
    chosen = FAMILIES[family]
    module = chosen.kind(chosen.config, recompute=family == "internvl")
    report = report_of(module, tiny_data(records, images=chosen.images, token_budget=400))
    assert (report.findings, report.dtype) == ([], torch.float64)
    assert report.needed_weights == [], "its decoder may have stages"


class Gemma3(flow.models.HuggingFaceVLM):
    """As the guide's other family, without a mask of its own."""

    families = ("gemma3",)
    halves = flow.models.GemmaVLM.halves

    def encode(self, media: Any) -> Any:
        return self.model.model.get_image_features(media.images(), return_dict=True).pooler_output.flatten(0, 1)


def test_a_family_whose_image_tokens_see_ahead_is_refused_where_it_has_no_mask(records):
    chosen = FAMILIES["gemma3"]
    config = {**chosen.config, "text_config": {**chosen.config["text_config"], "sliding_window": 512}}
    (finding,) = report_of(Gemma3(config), tiny_data(records, images=chosen.images, token_budget=400)).findings
    assert "even one sample alone gives something else than the model's own forward" in finding.sentence


_NOT_ITS_OWN = "even one sample alone gives something else than the model's own forward"
_FOUND = {
    "lfm2_vl": None,
    "lfm3_vl": None,
    "gemma4": None,
    "gemma4 that sees images whole": _NOT_ITS_OWN,
    "molmo2": _NOT_ITS_OWN,
    "qwen3_5 of attention": _NOT_ITS_OWN,
    "qwen3_5": _NOT_ITS_OWN,
    "qwen2_vl": _NOT_ITS_OWN,
    "qwen3_vl": "Qwen3VLModel does not take what encode gives as all features of an image",
}
_SHORT = ()


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=() if name in _SHORT else pytest.mark.full) for name in _FOUND]
)
def test_a_family_that_no_class_trains_is_refused_by_what_it_would_lose_or_is_exact(records, family):
    if not FOREIGN[family].is_installed:
        pytest.skip(f"this version of transformers has no {FOREIGN[family].made_by}")
    found = [finding.sentence for finding in report_of(FOREIGN[family].module(), tiny_data(records)).findings]
    assert len(found) == (_FOUND[family] is not None), found
    assert all(str(_FOUND[family]) in sentence for sentence in found), found
