"""The command ``flowtrain index``: measures data ahead of a run, by several processes or on a cluster."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from flowtrain_lightning.cli.command_table import COMMANDS, UsageError
from flowtrain_lightning.cli.train_command import MISTAKES, BriefParser, configured
from flowtrain_lightning.data.sources import measurers

__all__ = ["MISTAKES", "run"]

_NAME = "flowtrain index"


class IndexCLI(LightningCLI):
    """Takes the configuration that ``flowtrain fit`` takes, and who measures."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The options of this command."""
        _add_own_options(parser)


class IndexParser(BriefParser):
    """Shows this command's own options in its help, and where those are that make up the configuration."""

    def print_help(self, *args: Any, **kwargs: Any) -> None:
        """The text of ``--help``."""
        if self.prog != _NAME:  # of a class, such as `--data.tokenizer.help` asks for
            super().print_help(*args, **kwargs)
            return
        own = argparse.ArgumentParser(
            _NAME,
            f"{_NAME} --config CONFIG [options]",
            COMMANDS["index"].meaning,
            "What the configuration says may also be given as options, such as --data.train data.jsonl: `flowtrain fit "
            "--help` shows them. Of it only data counts here, and what the model names for them.",
        )
        own.add_argument("-c", "--config", help="the YAML file that `flowtrain fit` takes")
        _add_own_options(own)
        own.print_help(*args, **kwargs)


def _add_own_options(parser: argparse.ArgumentParser | LightningArgumentParser) -> None:
    count = os.cpu_count() or 1
    parser.add_argument(
        "--processes", type=int, default=count, help=f"that measure (default: one for each processor, here {count})"
    )
    parser.add_argument(
        "--ray",
        action="store_true",
        help="measure on the Ray cluster of RAY_ADDRESS instead, or on one that is started here (extra: ray)",
    )


def run() -> None:
    """Measure the data of all stages, keep the indexes, and print what is used of them.

    Raises:
        UsageError: jsonargparse is not installed, or there is no process to measure.
        DataError: the data cannot be read, or a record cannot be used.
    """
    del sys.argv[1]  # Lightning reads the rest of the command line, where it would take this word for an option's
    cli = configured(IndexCLI, IndexParser, run=False, save_config_callback=None, parser_kwargs={"prog": _NAME})
    if cli.config.processes < 1:
        raise UsageError(f"--processes is {cli.config.processes}; give 1 or more.")
    cli.datamodule.read_as(cli.model)  # which may name tokenizer, template and images
    begin = time.monotonic()
    measurer = measurers.ray_cluster if cli.config.ray else measurers.processes(cli.config.processes)
    for summary in cli.datamodule.index_ahead(measurer):
        print(summary)
    print(f"Indexed in {time.monotonic() - begin:.1f} s.")
