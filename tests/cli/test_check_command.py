"""The command ``flowtrain check``."""

from __future__ import annotations

import sys

import pytest

from flowtrain_lightning.cli import main
from tests.cli.test_profile_command import CONFIG
from tests.tiny import write_records


@pytest.fixture
def check(monkeypatch, tmp_path, capsys):
    """Checks in a folder of its own; answers with the exit code and what was printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    write_records(tmp_path, 16)

    def run(config, *arguments):
        (tmp_path / "config.yaml").write_text(config)
        monkeypatch.setattr(sys, "argv", ["flowtrain", "check", "-c", "config.yaml", *arguments])
        try:
            main()
        except SystemExit as end:
            return end.code, "".join(capsys.readouterr())
        return 0, capsys.readouterr().out

    return run


def test_a_right_module_ends_with_0(check):
    code, text = check(CONFIG)
    assert code == 0
    assert "TinyVLM, 6 samples with " in text
    assert text.rstrip().endswith("packed equals alone.")


def test_a_wrong_module_ends_with_1_and_a_sentence(check):
    code, text = check(CONFIG.replace("tests.tiny.TinyVLM", "tests.packing_check.wrong_modules.NormalisesByBatch"))
    assert code == 1
    assert "- encode: encoder.norm (BatchNorm1d) normalises by the statistics of whatever is packed together" in text


def test_a_check_that_proves_nothing_ends_with_2(check):
    code, text = check(CONFIG.replace("tests.tiny.TinyVLM", "tests.packing_check.test_first_fit.NeedsTraining"))
    assert code == 2
    assert "nothing is proven of NeedsTraining, since the check ended with RuntimeError: only in a run" in text
    assert "packed equals alone" not in text
    assert "in merge" in text, "where it was raised"
