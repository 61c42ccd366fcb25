"""The ways of CONTRIBUTING.md: in a copy of the package only the files that it names are changed, and then it works."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.paths import ROOT
from tests.tiny import write_records
from tests.ways.pasting import blocks, run

pytestmark = pytest.mark.full

PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


class Copy:
    """A copy of the package and the tests' helpers, in which the files that one of the ways names may be changed."""

    def __init__(self, folder: Path, way: str) -> None:
        self._folder = folder
        self._text = PAGE.split(f"### {way}\n")[1].split("\n#")[0]
        for part in ("flowtrain_lightning", "tests"):
            shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__", "results"))

    def add(self, place: str, text: str) -> None:
        """A new file in a folder that the page names."""
        folder = place.rpartition("/")[0]
        assert folder in self._text, f"the page does not say that a file goes into {folder}"
        (self._folder / "flowtrain_lightning" / place).write_text(text)

    def change(self, file: str, before: str, after: str) -> None:
        """A change in a file that the page names."""
        assert file in self._text, f"the page does not name {file}"
        path = self._folder / "flowtrain_lightning" / file
        text = path.read_text()
        assert text.count(before) == 1, before
        path.write_text(text.replace(before, after))

    def run(self, script: str) -> str:
        """What a script prints that imports the copy."""
        (self._folder / "script.py").write_text(script)
        return run(self._folder, "PYTHONPATH=$PWD python script.py")


def test_a_family_with_a_class_of_its_own_is_found_by_its_name(tmp_path):
    copy = Copy(tmp_path, "A family of models")
    copy.add(
        "models/idefics.py",
        "from flowtrain_lightning.models.smolvlm import SmolVLM\n\n\nclass Idefics3VLM(SmolVLM):\n"
        '    families = ("idefics3",)\n',
    )
    line = "from flowtrain_lightning.models.idefics import Idefics3VLM\n"
    copy.change(
        "models/__init__.py",
        "from flowtrain_lightning.models.image_words",
        f"{line}from flowtrain_lightning.models.image_words",
    )
    copy.change(
        "models/pretrained.py",
        "from flowtrain_lightning.models.internvl",
        f"{line}from flowtrain_lightning.models.internvl",
    )
    copy.change("models/pretrained.py", "    SmolVLM,\n", "    SmolVLM,\n    Idefics3VLM,\n")
    said = copy.run(
        "import flowtrain_lightning as flow\nprint(flow.models.module_class('idefics3') is flow.models.Idefics3VLM)"
    )
    assert said.splitlines()[-1] == "True"


TRAIN = """
import flowtrain_lightning as flow
from pathlib import Path
from tests.exactness.layouts import trainer_for
from tests.tiny import TinyVLM, tiny_data

if __name__ == "__main__":
    trainer = trainer_for({layout!r}, strategy={strategy!r}, max_steps=2, limit_val_batches=0)
    trainer.fit(TinyVLM(), tiny_data(Path.cwd()))
    print("loss", float(trainer.callback_metrics["train_loss"]))
"""


def losses(said: str) -> list[str]:
    return re.findall(r"^loss .*$", said, flags=re.MULTILINE)


def test_a_layout_is_planned_and_trained(tmp_path):
    copy = Copy(tmp_path, "A layout")
    write_records(tmp_path, 8)
    plain = copy.run(TRAIN.format(layout="colocated 2", strategy={}))
    copy.change("allocator/role_layout.py", '"deepspeed-3"]', '"deepspeed-3", "twins"]')
    copy.change(
        "allocator/role_problem.py", '    "zero1": ("states",),\n', '    "zero1": ("states",),\n    "twins": (),\n'
    )
    copy.change("cli/plan_words.py", '    "zero1": ', '    "twins": "two of each",\n    "zero1": ')
    copy.add(
        "parallel/twins.py",
        "from flowtrain_lightning.parallel.replicate import ReplicatedHalf\n\n\n"
        "class Twins(ReplicatedHalf):\n    pass\n",
    )
    copy.change(
        "parallel/layouts.py",
        "\n_PRECISION",
        "from flowtrain_lightning.parallel.twins import Twins\n\n_PRECISION",
    )
    copy.change(
        "parallel/layouts.py",
        '    elif layout.shard == "replicate":\n',
        '    elif layout.shard == "twins":\n        fill(None)\n'
        "        engine = Twins(held_parameters(module, role), groups.all, early=early, activations=on_host)\n"
        '    elif layout.shard == "replicate":\n',
    )
    copy.change(
        "placement/request.py", "_TRAINED: tuple[Sharding, ...] = (", '_TRAINED: tuple[Sharding, ...] = ("twins", '
    )
    said = copy.run(TRAIN.format(layout="colocated 2", strategy={"roles": {"backbone": {"shard": "twins"}}}))
    assert losses(said) == losses(plain) != []


def test_an_order_is_followed(tmp_path):
    copy = Copy(tmp_path, "An order")
    write_records(tmp_path, 8)
    plain = copy.run(TRAIN.format(layout="1+1", strategy={}))
    copy.add(
        "packing/policies/told.py",
        "from flowtrain_lightning.packing.policies.forwards_first import forwards_first\n\n\n"
        "def told(*arguments):\n    print('the order is asked for')\n    return forwards_first(*arguments)\n",
    )
    copy.change(
        "packing/policies/member_orders.py",
        "from flowtrain_lightning.packing.policies.forwards_first import forwards_first, recomputed_batches\n",
        "from flowtrain_lightning.packing.policies.forwards_first import recomputed_batches\n"
        "from flowtrain_lightning.packing.policies.told import told as forwards_first\n",
    )
    said = copy.run(TRAIN.format(layout="1+1", strategy={}))
    assert "the order is asked for" in said
    assert losses(said) == losses(plain) != []


def test_a_kind_of_file_is_read(tmp_path):
    copy = Copy(tmp_path, "A source of data")
    (source,) = blocks("CONTRIBUTING.md", "python", "A source of data")
    copy.add("data/sources/semicolon_file.py", source)
    copy.change(
        "data/sources/naming.py",
        "from flowtrain_lightning.data.sources.tar_shard",
        "from flowtrain_lightning.data.sources.semicolon_file import SemicolonFile\n"
        "from flowtrain_lightning.data.sources.tar_shard",
    )
    copy.change("data/sources/naming.py", '{".parquet"', '{".semi": SemicolonFile, ".parquet"')
    (tmp_path / "d.semi").write_text("question;answer\n" + "".join(f"what {n};an answer\n" for n in range(8)))
    said = copy.run(
        "import flowtrain_lightning as flow\nfrom tests.tiny import CharTokenizer\n"
        "columns = flow.Columns('question', 'answer')\n"
        "sizes = {'token_budget': 99, 'global_batch_size': 4}\n"
        "data = flow.FlowDataModule('d.semi', tokenizer=CharTokenizer(), columns=columns, **sizes)\n"
        "data.setup('fit')\nprint([len(batch.plan.samples) for batch in data.train_dataloader()])"
    )
    assert said.splitlines()[-1] == "[4, 4]"
