"""The command ``flowtrain profile``: how long the halves of a module take on this device, and what its data ask."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from flowtrain_lightning.allocator import PRECISIONS
from flowtrain_lightning.allocator.devices import maker_device
from flowtrain_lightning.allocator.flops import FloatArray
from flowtrain_lightning.cli.command_table import COMMANDS
from flowtrain_lightning.cli.train_command import MISTAKES, BriefParser, configured
from flowtrain_lightning.packing import IntArray
from flowtrain_lightning.packing.cost_model import predict
from flowtrain_lightning.placement.data_profile import DataProfile, profile_data
from flowtrain_lightning.placement.module_profile import profile_module
from flowtrain_lightning.placement.profile import Profile, ProfileError, ProfileOrigin, RoleProfile, write_profile
from flowtrain_lightning.placement.text_table import text_table

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
        """The text of ``--help``."""
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
    data = profile_data(cli.datamodule, found, devices, cli.model.role_graph)
    if options.plot is not None:
        from flowtrain_lightning.cli.plots import draw_profile

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
            "writing Parquet needs pyarrow; install it with: pip install 'flowtrain-lightning[pack]'"
        ) from error
    sizes = data.sizes
    columns = {"tokens": sizes.tokens}
    for modality, lengths in data.workload.media.items():
        counts = np.bincount(sizes.media_sample[sizes.of_modality(modality)], minlength=len(sizes))
        starts = np.concatenate([[0], np.cumsum(counts)]).astype("int32")
        columns[f"{modality}_tokens"] = pyarrow.ListArray.from_arrays(starts, lengths)
        if (numbers := data.workload.content.get(modality)) is not None:
            columns[f"{modality}_content"] = pyarrow.ListArray.from_arrays(starts, numbers)
    try:
        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    except OSError as error:
        raise ProfileError(f"{path} cannot be written: {error}") from error


_SHOWN = 5
"""Sizes of each half in the table."""

_POOR_HALF, _POOR_WORST = 0.15, 0.4
"""Relative errors of half of the sizes, and of the worst one, above which a fit is called poor."""


def profile_as_text(profile: Profile) -> str:
    """The measured profile, for a terminal."""
    origin = profile.origin
    threads = origin.settings["threads"]
    heading = (
        f"{origin.module.split()[0]} on {origin.device}, {threads} thread{'s' if threads != 1 else ''}, "
        f"{origin.settings['precision']}"
    )
    parts = [heading, _times(profile), *(_half(role, profile) for role in profile.roles)]
    if not profile.whole:
        parts.append("The halves did not fit whole. Each was measured with one and with two of its layers.")
    if (summed := profile.reduction) is not None:
        speed = f"{1e3 * summed.constant:.2f} ms and {1e9 * summed.seconds_per_byte:.2f} ms a megabyte"
        parts.append(f"{summed.ranks} ranks sum their gradients in {speed}.")
    return "\n\n".join(parts)


def _times(profile: Profile) -> str:
    lines = []
    for role in profile.roles:
        half = profile.roles[role]
        ordered = sorted(half.measured, key=lambda item: item.tokens)
        for number in np.unique(np.linspace(0, len(ordered) - 1, _SHOWN).round().astype(int)) if ordered else ():
            item = ordered[number]
            fitted = predict(half.cost, item)
            lines.append(
                (
                    role,
                    f"{item.tokens:,.0f}",
                    f"{1e3 * item.seconds:.2f}",
                    f"{1e3 * fitted:.2f}",
                    f"{100 * (fitted / item.seconds - 1):+.1f} %",
                    "unknown" if half.flops is None else _speed(half.flops.of(item) / item.seconds),
                )
            )
    return text_table(("", "tokens", "measured ms", "fitted ms", "error", "speed"), lines)


def _half(role: str, profile: Profile) -> str:
    half = profile.roles[role]
    size = f"{half.parameters / 1e6:,.2f}M parameters"
    if not half.measured:
        return f"{role}: {size}; not measured, as no sample needs it."
    unit = "token" if role == profile.trunk else "patch"
    cost = half.cost
    terms = [f"{1e3 * cost.constant:.2f} ms", f"{1e6 * cost.linear:.2f} us a {unit}"]
    if cost.quadratic:
        terms.append(f"{1e9 * cost.quadratic:.2f} ns a pair")
    passes = "forward" if half.forward_share == 1 else "forward and backward"
    lines = [
        f"{role}: {size}, {'trained' if half.trains else 'frozen'}",
        f"{passes}: {' + '.join(terms)}; half of the errors are below {100 * half.error:.1f} %",
    ]
    lines += _poor_fit(half)
    if half.forward_share < 1:
        lines.append(f"of this the forward is {100 * half.forward_share:.0f} %")
    lines += _utilisation(half, profile.origin)
    if half.trains:
        lines.append(f"optimizer step: {1e3 * half.optimizer_seconds:.2f} ms")
    return "\n  ".join(lines)


def _poor_fit(half: RoleProfile) -> list[str]:
    """A warning where times do not follow the fitted cost; nothing where they do."""
    worst = max(half.measured, key=half.error_of)
    if half.error <= _POOR_HALF and half.error_of(worst) <= _POOR_WORST:
        return []
    return [
        f"WARNING: the fit is poor, {100 * half.error_of(worst):.0f} % off at {worst.tokens:,.0f}. What is planned by "
        "this profile may be off as much. Measure longer (--seconds), while nothing else runs here, on data whose "
        "samples differ in size."
    ]


def _utilisation(half: RoleProfile, origin: ProfileOrigin) -> list[str]:
    """FLOP/s of all sizes together, and the share of the peak where the device is known."""
    achieved = half.flops_per_second
    if achieved is None:
        return []
    line = f"computes at {_speed(achieved)}"
    device, precision = maker_device(origin.device), PRECISIONS.get(str(origin.settings["precision"]))
    if device is not None and precision is not None:
        most = device.peak_for(precision.computing)
        line += f", {100 * achieved / most:.1f} % of an {device.name}'s {_speed(most)}"
    return [line]


def _speed(flops_per_second: float) -> str:
    unit, size = ("T", 1e12) if flops_per_second >= 1e12 else ("G", 1e9)
    return f"{flops_per_second / size:,.1f} {unit}FLOP/s"


def data_as_text(data: DataProfile) -> str:
    """The data's lengths, for a terminal."""
    sizes = data.sizes
    lengths: list[tuple[str, IntArray]] = [
        ("tokens of a sample", sizes.tokens),
        ("media items of a sample", np.diff(sizes.media_start)),
    ]
    if len(sizes.media_patches):
        lengths += [("patches of a media item", sizes.media_patches)]
        lengths += [("rows of features of a media item", sizes.media_rows)]
    table = text_table(
        ("", "least", "median", "mean", "95 %", "most"), [(name, *_spread(values)) for name, values in lengths]
    )
    return f"{_split_of_devices(data)}\n\n{table}"


def _split_of_devices(data: DataProfile) -> str:
    share = f"the encoder has {100 * data.encoder_share:.0f} % of the work"
    split = f"{data.encoder_devices} of {data.devices} devices"
    if data.stable:
        return f"Data: in every draw of {len(data.sizes):,} of {data.available:,} samples {share}, or so: {split}."
    return f"Data: in {len(data.sizes):,} of {data.available:,} samples {share}: {split}."


def _spread(values: IntArray | FloatArray) -> Sequence[str]:
    figures = [values.min(), np.median(values), values.mean(), np.percentile(values, 95), values.max()]
    return [f"{figure:,.1f}" if figure != round(float(figure)) else f"{figure:,.0f}" for figure in figures]
