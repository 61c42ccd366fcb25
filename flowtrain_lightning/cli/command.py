"""The command ``flowtrain``: Lightning's subcommands for a FlowModule, and those of this package."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from difflib import get_close_matches
from importlib.metadata import version
from io import TextIOWrapper
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException

from flowtrain_lightning.allocator import AllocationError, PlanningError
from flowtrain_lightning.checkpoint import export_checkpoint
from flowtrain_lightning.cli.configuration import UsageError, configured
from flowtrain_lightning.cli.doctor import examine, examine_pool
from flowtrain_lightning.cli.pack import PACK_DESCRIPTION, pack
from flowtrain_lightning.cli.plan import PLAN_DESCRIPTION, plan
from flowtrain_lightning.cli.profile import PROFILE_DESCRIPTION, profile
from flowtrain_lightning.cli.simulate import SIMULATE_DESCRIPTION, simulation
from flowtrain_lightning.data import DataError, ImageError
from flowtrain_lightning.packing import PackingError
from flowtrain_lightning.profiling import ProfileError

MISTAKES = (
    UsageError,
    MisconfigurationException,
    AllocationError,
    PlanningError,
    PackingError,
    ProfileError,
    DataError,
    ImageError,
)
"""Errors whose message says all that a user needs: the command prints it and no traceback."""


def main() -> None:
    """Run the command that the command line names."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a letter shows a question mark
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print(_help())
        return
    if name == "--version":
        print(f"flowtrain-lightning {version('flowtrain-lightning')}")
        return
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        sys.exit(f"flowtrain: there is no command {name!r}.{hint} Choose from {', '.join(COMMANDS)}.")
    run, _ = COMMANDS[name]
    try:
        run()
        sys.stdout.flush()
    except MISTAKES as error:
        sys.exit(f"flowtrain {name}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)  # as shells report a command that Ctrl-C ended
    except OSError as error:
        if run in (train, profile):  # whose processes may have lost each other
            raise
        if error.filename is None:  # the output: the interpreter would try once more at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        reader_is_gone = isinstance(error, BrokenPipeError)  # `head`, for one, has read what it wanted
        what = error.filename or "what it prints"
        sys.exit(1 if reader_is_gone else f"flowtrain {name}: {what} cannot be read or written: {error.strerror}.")


def train() -> None:
    """Run one of the Trainer's entry points on a module and data that a YAML file or options describe.

    Raises:
        UsageError: if jsonargparse is not installed.
    """
    configured(save_config_kwargs={"overwrite": True})


def export() -> None:
    """Write a checkpoint directory as one plain Lightning ``.ckpt`` file.

    Raises:
        UsageError: if the directory is no checkpoint, or the file exists or cannot be written.
    """
    parser = argparse.ArgumentParser(prog="flowtrain export", description=COMMANDS["export"][1])
    parser.add_argument("checkpoint", type=Path, help="a checkpoint directory that flowtrain wrote")
    parser.add_argument("out", type=Path, metavar="out.ckpt", help="the file to write; it must not exist")
    parser.add_argument(
        "--weights_only",
        choices=("true", "false"),
        default="true",
        help="false also reads objects that are no tensors or plain data, which may run code: only for what you trust",
    )
    options = parser.parse_args(sys.argv[2:])
    if not options.checkpoint.is_dir():
        raise UsageError(f"{options.checkpoint} is no checkpoint directory.")
    if options.out.exists():
        raise UsageError(f"{options.out} exists; choose another name.")
    try:
        export_checkpoint(options.checkpoint, options.out, weights_only=options.weights_only == "true")
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    print(f"Wrote {options.out} ({options.out.stat().st_size / 2**20:.1f} MiB).")


def doctor() -> None:
    """Print what this machine offers, one line each."""
    parser = argparse.ArgumentParser(prog="flowtrain doctor", description=COMMANDS["doctor"][1])
    parser.add_argument("--pool", action="store_true", help="look at the pool instead, and pass entries through it")
    options = parser.parse_args(sys.argv[2:])
    for finding in examine_pool() if options.pool else examine():
        print(finding)


COMMANDS: dict[str, tuple[Callable[[], None], str]] = {
    "fit": (train, "train and validate"),
    "validate": (train, "one pass over the validation set"),
    "test": (train, "one pass over the test set"),
    "predict": (train, "run predict_step over a set"),
    "export": (export, "write a checkpoint directory as one plain Lightning .ckpt file"),
    "profile": (profile, PROFILE_DESCRIPTION),
    "plan": (plan, PLAN_DESCRIPTION),
    "simulate": (simulation, SIMULATE_DESCRIPTION),
    "pack": (pack, PACK_DESCRIPTION),
    "doctor": (doctor, "print what this machine offers: versions, devices, kernel services, attention kernels"),
}
"""Each command with what it does."""


def _help() -> str:
    commands = [f"  {name:<10} {meaning}" for name, (_, meaning) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: flowtrain COMMAND [options]",
            "",
            "Train vision-language models with encoder ranks and backbone ranks.",
            "",
            *commands,
            "",
            "`flowtrain COMMAND --help` lists a command's options. A training starts with",
            "  flowtrain fit --config config.yaml",
            "whose classes are found in installed packages and in the current folder.",
        ]
    )
