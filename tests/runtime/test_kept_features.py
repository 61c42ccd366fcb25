"""Features of a frozen encoder that are kept: no forward from the second epoch on, and losses equal to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.data.features.test_feature_store import files
from tests.exactness.layouts import ranks_of
from tests.forks import Job, read_down, run_jobs
from tests.runtime.keeping import Notes, fit
from tests.tiny import write_records

Found = dict[str, list[Any]]

LAYOUTS = [
    pytest.param("1+1", {}, id="1+1", marks=pytest.mark.full),
    pytest.param("colocated 2", {}, id="colocated 2"),
    pytest.param("2+1", {}, id="2+1", marks=pytest.mark.full),
    pytest.param("mixed 1+1", {}, id="mixed 1+1", marks=pytest.mark.full),
    pytest.param("ddp 2", {}, id="ddp 2", marks=pytest.mark.full),
    pytest.param("1+2", {"roles": {"backbone": {"shard": "fsdp"}}}, id="1+2 fsdp", marks=pytest.mark.full),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kept") / "data"
    write_records(folder, 24)
    write_records(folder, 8, "val.jsonl", seed=3)
    return folder


@pytest.fixture(scope="module")
def without(data: Path) -> Found:
    return fit(data, "auto", None)


def same_losses(one: Found, other: Found) -> bool:
    return (one["train"], one["val"]) == (other["train"], other["val"])


def test_one_process_encodes_in_the_first_epoch_alone_and_later_runs_never(
    data: Path, without: Found, tmp_path: Path
) -> None:
    first, later = (fit(data, "auto", tmp_path / "store") for _ in range(2))
    assert same_losses(first, without)
    assert same_losses(later, without)
    assert first["calls"][0] > 0
    assert first["calls"][1:] == first["calls"][:1] * 3, "no forward after the first training and validation"
    assert later["calls"] == [0] * 4
    assert any("read from where features are kept, and 0 encoded" in said for said in later["said"])
    told = [said for said in first["said"] if "the features of a media item are read in" in said]
    assert len(told) == 1
    assert "so keeping them" in told[0]


@pytest.mark.parametrize(("layout", "settings"), LAYOUTS)
def test_ranks_keep_features_for_each_other(layout: str, settings: dict[str, Any], data: Path, tmp_path: Path) -> None:
    arguments = {"data": str(data), "layout": layout, "store": str(tmp_path / "store"), **settings}
    done = run_jobs(tmp_path, [Job("kept", "tests.runtime.keeping:train", ranks_of(layout), arguments)])
    for rank in read_down(done["kept"].check().folder):
        assert same_losses(rank["first"], rank["without"])
        assert same_losses(rank["later"], rank["without"])
        assert rank["first"]["calls"][1:] == rank["first"]["calls"][:1] * 3
        assert set(rank["later"]["calls"]) == {0}
    told = done["kept"].log.count("so it has nothing left to do: with FlowTrainStrategy(placement='colocated')")
    assert bool(told) == layout.startswith(("1+", "2+", "mixed"))


@pytest.mark.full
def test_other_weights_processors_and_tower_settings_find_nothing_of_each_other(
    data: Path, without: Found, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    fit(data, "auto", store, max_epochs=1)
    changed = fit(data, "auto", store, notes=Notes(changes=(1,)))
    assert same_losses(changed, fit(data, "auto", None, notes=Notes(changes=(1,))))
    assert not same_losses(changed, without)
    calls = changed["calls"]
    assert calls[0] == 0
    assert 0 < calls[2] == calls[-1], "encoded anew with the weights of the second epoch, and never again"
    kept = len(files(store))
    fit(data, "auto", store, module={"levels": 2}, max_epochs=1)
    assert len(files(store)) == kept * 3 // 2


@pytest.mark.full
def test_a_tower_that_trains_or_draws_random_numbers_is_not_kept(data: Path, without: Found, tmp_path: Path) -> None:
    trains = fit(data, "auto", tmp_path / "trains", module={"freeze_encoder": False}, max_epochs=1)
    assert any("not kept: it trains" in said for said in trains["said"])
    draws = fit(data, "auto", tmp_path / "draws", module={"dropout": 0.1}, max_epochs=1, limit_val_batches=0)
    assert [said for said in draws["said"] if "'dropout' draws random numbers" in said]
    assert not files(tmp_path / "trains") + files(tmp_path / "draws")
    later = fit(data, "auto", tmp_path / "later", notes=Notes(unfreezes=1))
    plain = fit(data, "auto", None, notes=Notes(unfreezes=1))
    assert same_losses(later, plain)
    assert later["train"][:3] == without["train"][:3]


def test_augmented_pictures_are_refused(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="augmentation changes pictures by chance"):
        fit(data, "auto", tmp_path, settings={"augment": lambda image, generator: image})


@pytest.mark.full
def test_damaged_files_are_made_anew(data: Path, without: Found, tmp_path: Path) -> None:
    fit(data, "auto", tmp_path, max_epochs=1)
    whole = {file: file.read_bytes() for file in files(tmp_path)}
    for number, (file, content) in enumerate(whole.items()):
        file.write_bytes((content[:-1] + bytes([content[-1] ^ 1]), content[:-5], b"")[number % 3])
    assert same_losses(fit(data, "auto", tmp_path), without)
    assert {file: file.read_bytes() for file in files(tmp_path)} == whole


@pytest.mark.full
def test_on_a_full_disk_training_goes_on_with_one_warning(data: Path, without: Found, tmp_path: Path) -> None:
    found = fit(data, "auto", tmp_path / "disk", notes=Notes(full_from=1))
    assert same_losses(found, without)
    assert len([said for said in found["said"] if "no more features of the encoder are kept" in said]) == 1
    bounded = fit(data, "auto", tmp_path / "bound", most_bytes=3000)
    assert same_losses(bounded, without)
    assert len([said for said in bounded["said"] if "most_bytes=3,000 of KeepFeatures are taken" in said]) == 1
    assert 0 < sum(file.stat().st_size for file in files(tmp_path / "bound")) <= 3000


@pytest.mark.full
def test_nothing_of_a_run_that_was_killed_is_read_wrongly(data: Path, tmp_path: Path) -> None:
    arguments = {"data": str(data), "layout": "auto", "store": str(tmp_path / "store")}
    killed = Job("killed", "tests.runtime.keeping:train", 1, {**arguments, "killed_at": (0, 3)})
    after = Job("after", "tests.runtime.keeping:train", 1, arguments)
    done = run_jobs(tmp_path, [killed, after])
    assert done["killed"].codes == [-9]
    (rank,) = read_down(done["after"].check().folder)
    assert same_losses(rank["first"], rank["without"])
    assert set(rank["later"]["calls"]) == {0}
