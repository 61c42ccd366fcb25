"""The command ``flowtrain profile``: how long the halves of a module take on this device, and what its data ask."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from flowtrain_lightning.cli.command_table import COMMANDS
from flowtrain_lightning.cli.profile_report import data_as_text, profile_as_text
from flowtrain_lightning.cli.train_command import MISTAKES, BriefParser, configured
from flowtrain_lightning.placement.data_profile import DataProfile, profile_data
from flowtrain_lightning.placement.module_profile import profile_module
from flowtrain_lightning.placement.profile import ProfileError, write_profile

__all__ = ["MISTAKES", "run"]

_NAME = "flowtrain profile"
_LEAST_DEVICES = 8
"""Devices of the split that the drawn samples decide: two could be split in one way only."""


class ProfileCLI(LightningCLI):
    """Takes the configuration that ``flowtrain fit`` takes, and a few options of its own."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The options of this command."""
        _add_own_options(parser)


class ProfileParser(BriefParser):
    """Shows this command's own options in its help, and where those are that make up the configuration."""

    def print_help(self, *args: Any, **kwargs: Any) -> None:
        """What ``--help`` prints."""
        if self.prog != _NAME:  # of a class, such as `--trainer.accelerator.help` asks for
            super().print_help(*args, **kwargs)
            return
        own = argparse.ArgumentParser(
            _NAME,
            f"{_NAME} --config CONFIG [options]",
            COMMANDS["profile"].meaning,
            "What the configuration says may also be given as options, such as --data.token_budget 4096: `flowtrain "
            "fit --help` shows them. Of the Trainer only accelerator, devices, num_nodes and precision count here.",
        )
        own.add_argument("-c", "--config", help="the YAML file that `flowtrain fit` takes")
        _add_own_options(own)
        own.print_help(*args, **kwargs)


def _add_own_options(parser: argparse.ArgumentParser | LightningArgumentParser) -> None:
    add = parser.add_argument
    add("--out", type=Path, default=Path("profile.json"), help="the file to write (default: profile.json)")
    add("--seconds", type=float, default=20.0, help="about how long to measure (default: 20)")
    add("--plot", type=Path, help="a PNG to draw: times as fitted, and lengths of the data")
    add("--lengths", type=Path, help="a Parquet file to write: lengths for `flowtrain plan --data`")


def run() -> None:
    """Measure, write the profile, and print what was found.

    Raises:
        UsageError: jsonargparse is not installed.
        ProfileError: a file cannot be written.
        DataError: there are no training data, or they cannot be read.
    """
    del sys.argv[1]  # Lightning reads the rest of the command line, where it would take this word for an option's
    cli = configured(ProfileCLI, ProfileParser, run=False, save_config_callback=None, parser_kwargs={"prog": _NAME})
    options, trainer = cli.config, cli.trainer
    for path in filter(None, (options.out, options.plot, options.lengths)):
        if not path.parent.is_dir():
            raise ProfileError(f"{path} cannot be written: there is no folder {path.parent}.")
        if path.is_dir():
            raise ProfileError(f"{path} cannot be written: it is a folder; name a file.")
    if "OMP_NUM_THREADS" not in os.environ:  # in training, the ranks of a node share its processors
        torch.set_num_threads(max(1, torch.get_num_threads() // trainer.num_devices))
    device = trainer.strategy.root_device
    cli.datamodule.read_as(cli.model)
    found = profile_module(
        cli.model,
        cli.datamodule,
        accelerator=device.type,
        precision=trainer.precision,
        seconds=options.seconds,
        flops=True,
    )
    write_profile(found, options.out)
    devices = max(_LEAST_DEVICES, trainer.num_devices * trainer.num_nodes)
    data = profile_data(cli.datamodule, found, devices)
    if options.plot is not None:
        from flowtrain_lightning.cli.profile_plot import draw_profile

        draw_profile(found, data, options.plot)
    if options.lengths is not None:
        _write_lengths(data, options.lengths)
    print(f"{profile_as_text(found)}\n\n{data_as_text(data)}\n\nWrote {options.out}.")


def _write_lengths(data: DataProfile, path: Path) -> None:
    """An entry per drawn sample, as ``flowtrain plan --data`` reads them."""
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ProfileError(
            "writing Parquet needs pyarrow; install it with `pip install flowtrain-lightning[pack]`."
        ) from error
    sizes = data.sizes
    columns = {"tokens": sizes.tokens}
    for modality, lengths in data.workload.media.items():
        columns[f"{modality}_tokens"] = pyarrow.ListArray.from_arrays(sizes.media_start.astype("int32"), lengths)
    try:
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    except OSError as error:
        raise ProfileError(f"{path} cannot be written: {error}") from error
