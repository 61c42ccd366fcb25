"""The command ``flowtrain check``: whether packing changes what a module learns."""

from __future__ import annotations

import argparse
import sys
import traceback
from typing import Any

from lightning.pytorch.cli import LightningCLI

from flowtrain_lightning.cli.check_model import run_for_model
from flowtrain_lightning.cli.command_table import COMMANDS
from flowtrain_lightning.cli.train_command import MISTAKES, BriefParser, configured
from flowtrain_lightning.packing_check import CheckReport, report_of
from flowtrain_lightning.packing_check.checked_module import NotCheckable
from flowtrain_lightning.packing_check.findings import divided

__all__ = ["MISTAKES", "run"]

_NAME = "flowtrain check"
_UNPROVEN = 2
"""The exit code where the check found no difference because it compared nothing."""


class CheckParser(BriefParser):
    """Says in its help where the options are that make up the configuration."""

    def print_help(self, *args: Any, **kwargs: Any) -> None:
        """The text of ``--help``."""
        if self.prog != _NAME:  # of a class, such as `--model.help` asks for
            super().print_help(*args, **kwargs)
            return
        own = argparse.ArgumentParser(
            _NAME,
            f"{_NAME} --config CONFIG [options]\n       {_NAME} MODEL [--json]",
            f"{COMMANDS['check'].meaning}; ends with 1 where it does, and with 2 where nothing is proven",
            "What the configuration says may also be given as options, such as --data.train data.jsonl: `flowtrain fit "
            "--help` shows them. Of it model and data count here, and what FlowTrainStrategy(couples=...) names. "
            "A MODEL is the folder, name or model_type of one of Hugging Face: `flowtrain check MODEL --help`.",
        )
        own.add_argument("-c", "--config", help="the YAML file that `flowtrain fit` takes")
        own.print_help(*args, **kwargs)


def run() -> None:
    """Check the module with a few samples, and print what was found.

    Ends with 1 where packing changes something, and with 2 where the check could not tell.

    A model of Hugging Face is named in place of a configuration; see `run_for_model`.

    Raises:
        UsageError: jsonargparse is not installed, or there is no such model.
        DataError: there are no training data, or they cannot be read.
    """
    words = [word for word in sys.argv[2:] if word != "--json"]
    if words and not words[0].startswith("-"):
        run_for_model()
        return
    del sys.argv[1]  # Lightning reads the rest of the command line, where it would take this word for an option's
    cli = configured(parser=CheckParser, run=False, save_config_callback=None, parser_kwargs={"prog": _NAME})
    cli.trainer.datamodule = cli.datamodule  # type: ignore[attr-defined]
    report = _reported(cli)
    couples = {*cli.model.couples, *getattr(cli.trainer.strategy, "couples", ())}
    unnamed, named = divided(report.findings, couples)
    print(f"{type(cli.model).__name__}, {_what_was_packed(report)}:")
    for finding in unnamed:
        print(f"- {finding.sentence}")
    for finding in named:
        print(f"- couples says that it is to be so. {finding.sentence}")
    for hint in report.hints:
        print(f"- hint: {hint}")
    for reason in report.unproven:
        print(f"- nothing is proven: {reason}")
    if not report.findings and not report.unproven:
        print("packed equals alone.")
    if unnamed or report.unproven:
        sys.exit(1 if unnamed else _UNPROVEN)


def _reported(cli: LightningCLI) -> CheckReport:
    """Runs the check. Where it ends with an error, that is shown and this command ends."""
    try:
        return report_of(cli.model, cli.datamodule, cli.trainer)
    except MISTAKES:
        raise
    except Exception as error:  # whatever the user's methods raise
        if not isinstance(error, NotCheckable):
            traceback.print_exc()
        name = type(cli.model).__name__
        print(
            f"{_NAME}: nothing is proven of {name}, since the check ended with {type(error).__name__}: {error}",
            file=sys.stderr,
        )
        sys.exit(_UNPROVEN)


def _what_was_packed(report: CheckReport) -> str:
    media = f" with {report.media} media items" if report.media else ""
    return f"{report.samples} samples{media} together and one by one in {report.seconds:.1f} s"
