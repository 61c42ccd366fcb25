"""The commands ``flowtrain fit``, ``validate``, ``test`` and ``predict``, and how such read configuration files."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from textwrap import fill
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from flowtrain_lightning.allocator import PlanningError
from flowtrain_lightning.cli.command_table import UsageError
from flowtrain_lightning.data import DataError, FlowDataModule, MediaError
from flowtrain_lightning.module import FlowModule
from flowtrain_lightning.packing import PackingError
from flowtrain_lightning.placement.profile import ProfileError

MISTAKES = (MisconfigurationException, PlanningError, PackingError, ProfileError, DataError, MediaError)


class BriefParser(LightningArgumentParser):
    """Says what is wrong with an option without listing all options first."""

    def print_usage(self, *args: Any, **kwargs: Any) -> None:
        """Prints nothing; ``--help`` prints all."""


def run() -> None:
    """Run one of the Trainer's entry points on a module and data that a YAML file or options describe.

    Raises:
        UsageError: jsonargparse is not installed.
    """
    if {"-h", "--help"} & set(sys.argv[2:]):
        print(_first_of_help(sys.argv[1]))
    configured(save_config_kwargs={"overwrite": True})


def _first_of_help(command: str) -> str:
    """The first lines of ``--help``: an example, and the options of model and data."""
    classes = {"model": "flowtrain_lightning.models.QwenVLM", "data": "flowtrain_lightning.FlowDataModule"}
    model, data = classes.values()
    taken = fill(", ".join(list(signature(FlowDataModule).parameters)), 76, initial_indent="  ", subsequent_indent="  ")
    return "\n".join(
        [
            "An example, which a file may say as well (--config; see recipes/):",
            f"  flowtrain {command} --model {model} --model.model Qwen/Qwen2-VL-2B-Instruct \\",
            f"    --data {data} --data.train train.jsonl --data.token_budget 8192 \\",
            "    --trainer.strategy flowtrain --trainer.devices 8 --trainer.precision bf16-mixed",
            "",
            "Options begin with --model., --data. and --trainer.; what each takes is said by",
            *(f"  flowtrain {command} --{part}.help {name}" for part, name in classes.items()),
            "",
            "The data take:",
            taken,
            "",
        ]
    )


def configured(
    kind: type[LightningCLI] = LightningCLI, parser: type[BriefParser] = BriefParser, **settings: Any
) -> LightningCLI:
    """Reads configuration and command line. Classes are found in installed packages and in the current folder.

    Args:
        kind: what reads them.
        parser: what understands them.
        settings: further arguments of a ``LightningCLI``.

    Raises:
        UsageError: jsonargparse is not installed.
    """
    if find_spec("jsonargparse") is None:
        raise UsageError(
            "configuration files need jsonargparse; install it with: pip install 'flowtrain-lightning[cli]'"
        )
    sys.path.insert(0, str(Path.cwd()))
    return kind(
        FlowModule,
        FlowDataModule,
        parser_class=parser,
        subclass_mode_model=True,
        subclass_mode_data=True,
        auto_configure_optimizers=False,
        **settings,
    )
