"""The commands ``flowtrain fit``, ``validate``, ``test`` and ``predict``, and how such read configuration files."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
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
    configured(save_config_kwargs={"overwrite": True})


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
            "configuration files need jsonargparse; install it with `pip install flowtrain-lightning[cli]`."
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
