"""The process that measures: what is kept of it, and what happens where it fails."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from flowtrain_lightning.data import IndexConfig
from flowtrain_lightning.placement import measuring_process
from flowtrain_lightning.placement.measuring_process import measure_if_asked, measured_profile
from flowtrain_lightning.placement.module_profile import origin_of
from flowtrain_lightning.placement.profile import ProfileError, read_profile, write_profile
from tests.placement.profiles import make_profile
from tests.tiny import TinyVLM, tiny_data, write_records

TRAINER = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")), precision="32-true")


@pytest.fixture
def data(tmp_path):
    write_records(tmp_path, 12)
    return tiny_data(tmp_path)


def start_instead(monkeypatch, code):
    monkeypatch.setattr("sys.orig_argv", ["python", "-c", code])


def writes(profile, path):
    """Code that writes a profile where it is wanted."""
    write_profile(profile, path)
    return f"import os, shutil; shutil.copy({str(path)!r}, os.environ['FLOWTRAIN_PROFILE'].partition(':')[2])"


def origin(data, module=None):
    return origin_of(module or TinyVLM(), data, torch.device("cpu"), "32-true")


def test_what_was_measured_is_kept_beside_the_index_and_found_again(data, tmp_path, monkeypatch):
    profile = replace(make_profile(1, 2), origin=origin(data))
    start_instead(monkeypatch, writes(profile, tmp_path / "made.json"))
    assert measured_profile(TRAINER, TinyVLM(), data) == profile
    (kept,) = (tmp_path / ".flowtrain").glob("profile.*.json")
    assert read_profile(kept) == profile
    start_instead(monkeypatch, "raise SystemExit(1)")
    assert measured_profile(TRAINER, TinyVLM(), data) == profile


def test_another_module_is_measured_anew(data, tmp_path, monkeypatch):
    write_to = tmp_path / "made.json"
    for module in (TinyVLM(), TinyVLM(freeze_encoder=True)):
        profile = replace(make_profile(1, 2), origin=origin(data, module))
        start_instead(monkeypatch, writes(profile, write_to))
        assert measured_profile(TRAINER, module, data) == profile


def test_a_folder_of_the_cache_that_is_named_is_taken(tmp_path, monkeypatch):
    write_records(tmp_path, 12)
    data = tiny_data(tmp_path, index=IndexConfig(cache_dir=tmp_path / "cache"))
    start_instead(monkeypatch, writes(replace(make_profile(1, 2), origin=origin(data)), tmp_path / "made.json"))
    measured_profile(TRAINER, TinyVLM(), data)
    assert len(list((tmp_path / "cache").glob("profile.*.json"))) == 1


def test_a_script_that_comes_to_another_module_first_cannot_be_measured(data, tmp_path, monkeypatch):
    start_instead(monkeypatch, writes(make_profile(1, 2), tmp_path / "made.json"))
    with pytest.raises(ProfileError, match=r"came to .*a\.Module.* first, and not to .*TinyVLM"):
        measured_profile(TRAINER, TinyVLM(), data)
    assert not (tmp_path / ".flowtrain").exists()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("raise RuntimeError('out of memory')", r"exit code 1.*RuntimeError: out of memory"),
        ("pass", r"exit code 0 and measured nothing"),
    ],
)
def test_a_process_that_measures_nothing_is_told_with_its_last_words(data, monkeypatch, code, words):
    start_instead(monkeypatch, code)
    with pytest.raises(ProfileError, match=words):
        measured_profile(TRAINER, TinyVLM(), data)


def test_a_process_that_hangs_is_ended(data, monkeypatch):
    start_instead(monkeypatch, "import time; time.sleep(100)")
    monkeypatch.setattr(measuring_process, "DEADLINE_SECONDS", 0.5)
    with pytest.raises(ProfileError, match=r"had not ended after"):
        measured_profile(TRAINER, TinyVLM(), data)


def test_the_random_state_of_the_run_is_left_alone(data, monkeypatch):
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    start_instead(monkeypatch, "pass")
    with pytest.raises(ProfileError):
        measured_profile(TRAINER, TinyVLM(), data)
    assert torch.equal(torch.rand(3), expected)


def test_a_process_that_nobody_asked_goes_on(monkeypatch):
    monkeypatch.delenv("FLOWTRAIN_PROFILE", raising=False)
    measure_if_asked(TRAINER, TinyVLM())
