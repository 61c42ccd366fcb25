"""The command ``flowtrain index``."""

import sys

import pytest

from flowtrain_lightning.cli import main
from tests.cli.test_profile_command import CONFIG
from tests.paths import python_path
from tests.tiny import write_records


@pytest.fixture
def index(monkeypatch, tmp_path, capsys):
    """Indexes in a folder of its own; answers with what was printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", python_path())  # where workers of Ray find the module of the configuration
    write_records(tmp_path, 12)
    (tmp_path / "config.yaml").write_text(CONFIG)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["flowtrain", "index", "--config", "config.yaml", *arguments])
        main()
        return capsys.readouterr().out

    return run


def test_the_data_of_a_training_are_indexed_beside_them_and_counted(index, tmp_path):
    text = index("--processes", "2")
    assert text.startswith("train.jsonl: 12 of 12 records used.\ntrain: 12 samples make ")
    assert "\nIndexed in " in text
    (kept,) = (tmp_path / ".flowtrain").iterdir()
    measured = kept.stat().st_mtime_ns
    index("--processes", "1")
    assert kept.stat().st_mtime_ns == measured


def test_a_record_that_cannot_be_used_is_named(index, tmp_path):
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write("{")
    with pytest.raises(SystemExit, match=r"flowtrain index: .*record 13: not valid JSON"):
        index("--processes", "2")


@pytest.mark.parametrize(
    "others",
    [("--processes", "2"), pytest.param(("--ray",), marks=pytest.mark.full)],
    ids=["two processes", "a Ray cluster"],
)
def test_whoever_measures_the_index_is_the_same_to_the_byte(index, tmp_path, others):
    if "--ray" in others:
        pytest.importorskip("ray.data")
    indexes = []
    for measurer in (("--processes", "1"), others):
        index(*measurer)
        (kept,) = (tmp_path / ".flowtrain").iterdir()
        indexes.append(kept.read_bytes())
        kept.unlink()
    assert indexes[0] == indexes[1]


@pytest.mark.full
def test_a_record_that_a_ray_cluster_cannot_use_is_named(index, tmp_path):
    pytest.importorskip("ray.data")
    with (tmp_path / "train.jsonl").open("a") as file:
        file.write("{")
    with pytest.raises(SystemExit, match=r"flowtrain index: .*record 13: not valid JSON"):
        index("--ray")


def test_a_ray_cluster_without_ray_is_told(index, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(SystemExit, match=r"needs Ray Data, which is not installed: pip install"):
        index("--ray")


def test_no_process_is_refused(index):
    with pytest.raises(SystemExit, match="--processes is 0; give 1 or more"):
        index("--processes", "0")
