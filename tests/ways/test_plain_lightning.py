"""The way of somebody with a plain LightningModule, by docs/migrating.md alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.exactness.layouts import trainer_for
from tests.forks import Job, run_jobs
from tests.paths import ROOT
from tests.tiny import write_records
from tests.ways.pasting import adapted, blocks, run

PLAIN, SPLIT = blocks("docs/migrating.md", "python", "From plain Lightning")


@pytest.fixture
def own_data(tmp_path: Path) -> Path:
    """A folder with somebody's records and tokenizer."""
    write_records(tmp_path, 4)
    shutil.copy(ROOT / "recipes/quickstart/tokenizer.json", tmp_path)
    return tmp_path


def test_a_plain_module_under_the_strategy_is_sent_to_the_page_that_changes_it(tmp_path):
    names: dict[str, Any] = {}
    exec(PLAIN, names)
    with pytest.raises(TypeError, match=r"got Plain\. Derive it from FlowModule, as docs/migrating\.md shows"):
        trainer_for("colocated 1", default_root_dir=tmp_path).fit(names["Plain"](32, 32), train_dataloaders=[0])


def test_the_script_of_the_page_trains_on_one_device(own_data):
    script = adapted(SPLIT, {"devices=8": "devices=1", "vocabulary=32_000, width=512": "vocabulary=1024, width=32"})
    job = Job("train", "tests.ways.pasting:paste", 1, {"place": str(own_data), "script": script}, deadline=300)
    run_jobs(own_data, [job])["train"].check()
    assert list(own_data.rglob("epoch=0-step=*.ckpt"))


@pytest.mark.full
def test_the_script_of_the_page_trains_on_two_processes(own_data):
    (own_data / "train.py").write_text(adapted(SPLIT, {"devices=8": "devices=2"}))
    run(own_data, "python train.py")
    assert list(own_data.rglob("epoch=0-step=*.ckpt"))
