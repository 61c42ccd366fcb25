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


def test_a_wrong_module_ends_with_1_and_a_sentence_unless_couples_names_it(check):
    config = CONFIG.replace("tests.tiny.TinyVLM", "tests.packing_check.wrong_modules.NormalisesByBatch")
    code, text = check(config)
    assert code == 1
    assert "- encode: encoder.norm (BatchNorm1d) normalises by the statistics of whatever is packed together" in text
    strategy = "{class_path: flowtrain_lightning.FlowTrainStrategy, init_args: {couples: [batch_norm]}}"
    code, text = check(config.replace("strategy: flowtrain", f"strategy: {strategy}"))
    assert code == 0
    assert "couples says that it is to be so" in text


@pytest.mark.parametrize(
    ("module", "why"),
    [
        ("NeedsTraining", "nothing is proven of NeedsTraining, since the check ended with RuntimeError: only in a run"),
        ("LearnsNothing", "- nothing is proven: the loss of each of "),
    ],
)
def test_a_check_that_proves_nothing_ends_with_2(check, module, why):
    code, text = check(CONFIG.replace("tests.tiny.TinyVLM", f"tests.packing_check.test_first_fit.{module}"))
    assert code == 2
    assert why in text
    assert "packed equals alone" not in text
    assert ("in merge" in text) == (module == "NeedsTraining"), "where it was raised"
