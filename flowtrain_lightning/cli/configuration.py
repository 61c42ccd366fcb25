"""What commands share whose module, data and Trainer a YAML file or options describe."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from flowtrain_lightning.data import FlowDataModule
from flowtrain_lightning.module import FlowModule


class UsageError(Exception):
    """The command cannot do what it was asked for."""


class BriefParser(LightningArgumentParser):
    """Says what is wrong with an option without listing all options first."""

    def print_usage(self, *args: Any, **kwargs: Any) -> None:
        """Prints nothing; ``--help`` prints all."""


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
