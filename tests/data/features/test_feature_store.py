"""Features in a folder: what is read is what was written, whatever happens to files, and never more than the bound."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from flowtrain_lightning.data import FeatureStore, KeepFeatures

FEATURES = (torch.randn(6, 8), torch.randn(6, 2, 4, dtype=torch.bfloat16), torch.arange(6))


@pytest.fixture
def store(tmp_path: Path) -> FeatureStore:
    return opened(tmp_path, "eye")


def opened(folder: Path, name: str, most_bytes: int = 1 << 20) -> FeatureStore:
    store = KeepFeatures(folder, most_bytes).store(name)
    store.open()
    return store


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.safetensors"))


def bytes_on_disk(folder: Path) -> int:
    return sum(file.stat().st_size for file in files(folder))


def counted(folder: Path) -> int:
    return int(json.loads((folder / ".bytes").read_text())[0])


def test_features_come_back_as_they_were(store: FeatureStore) -> None:
    assert store.read("ab12", 6) is None
    assert store.write("ab12", FEATURES)
    found = store.read("ab12", 6)
    assert found is not None
    for one, other in zip(found, FEATURES, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def damages(content: bytes) -> Iterator[bytes]:
    """Every eighth byte changed; ends that are missing; another order; and no file of ours at all."""
    for place in range(0, len(content), 8):
        yield content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]
    yield from (b"", content[:7], content[: len(content) // 2], content[:-1], bytes(len(content)), content[::-1])
    yield (2**62).to_bytes(8, "little") + content[8:]
    yield content + b"more"


def test_a_damaged_file_is_never_read_and_goes(store: FeatureStore, tmp_path: Path) -> None:
    store.write("ab12", FEATURES)
    (file,) = files(tmp_path)
    whole = file.read_bytes()
    for number, content in enumerate(damages(whole)):
        file.write_bytes(content)
        found = store.read("ab12", 6)
        if found is not None:  # the damage is where nothing is told, such as spaces behind the header
            assert all(torch.equal(one, other) for one, other in zip(found, FEATURES, strict=True)), number
            continue
        assert not file.exists()
    assert store.write("ab12", FEATURES)
    assert store.read("ab12", 6) is not None
    assert store.read("ab12", 7) is None  # of another item than the plan counts on


def test_where_it_is_full_the_oldest_runs_features_go_first_and_ones_own_stay(tmp_path: Path) -> None:
    one = len(written_alone(tmp_path / "alone"))
    stores = {}
    for age, name in enumerate(("oldest", "older", "own")):
        stores[name] = opened(tmp_path / "kept", name, most_bytes=10 * one)
        os.utime(tmp_path / "kept" / name / "last_use", (1000 + age, 1000 + age))
    for name, number in (("older", 4), ("oldest", 4), ("own", 4)):
        for item in range(number):
            assert stores[name].write(f"0{item}", FEATURES)
    left = {name: len(files(tmp_path / "kept" / name)) for name in stores}
    assert left == {"oldest": 2, "older": 4, "own": 4}
    assert not stores["oldest"].write("0f", FEATURES)  # what runs that began later use is not taken from them
    for item in range(4, 10):
        assert stores["own"].write(f"0{item}", FEATURES)
    assert not stores["own"].write("0a", FEATURES)
    assert {name: len(files(tmp_path / "kept" / name)) for name in stores} == {"oldest": 0, "older": 0, "own": 10}
    assert counted(tmp_path / "kept") == bytes_on_disk(tmp_path / "kept")


def written_alone(folder: Path) -> bytes:
    opened(folder, "eye").write("ab12", FEATURES)
    (file,) = files(folder)
    return file.read_bytes()


def write_many(folder: Path, name: str, first: int) -> None:
    store = opened(folder, name, most_bytes=40_000)
    for item in range(first, first + 20):
        store.write(f"{item:04d}", FEATURES)


def test_processes_of_several_runs_keep_the_bound_together(tmp_path: Path) -> None:
    opened(tmp_path, "first")
    fork = multiprocessing.get_context("fork")
    writers = [
        fork.Process(target=write_many, args=(tmp_path, name, first), daemon=True)
        for name in ("first", "second")
        for first in (0, 10)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    assert bytes_on_disk(tmp_path) <= 40_000
    assert bytes_on_disk(tmp_path) <= counted(tmp_path) <= 40_000
    kept = [(name, item) for name in ("first", "second") for item in range(30)]
    found = [KeepFeatures(tmp_path, 40_000).store(name).read(f"{item:04d}", 6) for name, item in kept]
    assert sum(features is not None for features in found) == len(files(tmp_path)) > 20


def test_what_a_killed_writer_leaves_is_not_read_and_goes(tmp_path: Path) -> None:
    store = opened(tmp_path, "eye")
    store.write("ab12", FEATURES)
    child = os.fork()
    if not child:
        os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[assignment]
        store.write("ab34", FEATURES)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert store.read("ab34", 6) is None
    assert counted(tmp_path) > bytes_on_disk(tmp_path)
    for half_written in (tmp_path / "eye" / "ab").glob(".ab34*"):
        os.utime(half_written, (1000, 1000))
    (tmp_path / ".bytes").write_text("damaged")
    store.open()
    assert sorted(path.name for path in (tmp_path / "eye" / "ab").iterdir()) == ["ab12.safetensors"]
    assert counted(tmp_path) == bytes_on_disk(tmp_path)
    assert store.write("ab34", FEATURES)


def test_an_impossible_bound_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="most_bytes"):
        KeepFeatures(tmp_path, most_bytes=0)
