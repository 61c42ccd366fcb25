"""The command ``flowtrain``: Lightning's subcommands for a FlowModule, ``export`` and ``doctor``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException

from flowtrain_lightning.allocator import AllocationError
from flowtrain_lightning.doctor import examine
from flowtrain_lightning.packing import PackingError


class UsageError(Exception):
    """The command cannot do what it was asked for."""


MISTAKES = (UsageError, MisconfigurationException, AllocationError, PackingError)
"""Errors whose message says all that a user needs: the command prints it and no traceback."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command.

    Args:
        arguments: the command and its own arguments; None takes them from the command line.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    name = given[0] if given else "--help"
    if name in ("-h", "--help"):
        print(_help())
        return
    if name not in COMMANDS:
        near = get_close_matches(name, COMMANDS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        sys.exit(f"flowtrain: there is no command {name!r}.{hint} Choose from {', '.join(COMMANDS)}.")
    run, _ = COMMANDS[name]
    try:
        run(given)
    except MISTAKES as error:
        sys.exit(f"flowtrain {name}: {error}")


def train(arguments: list[str]) -> None:
    """Run one of the Trainer's entry points on a module and data that a YAML file or options describe.

    Classes are found in installed packages and in the current folder.

    Args:
        arguments: ``fit``, ``validate``, ``test`` or ``predict``, and Lightning's options for it.

    Raises:
        UsageError: if jsonargparse is not installed.
    """
    if find_spec("jsonargparse") is None:
        raise UsageError(
            "configuration files need jsonargparse; install it with `pip install flowtrain-lightning[cli]`."
        )
    # Slow to import, and needed by this command only.
    from lightning.pytorch.cli import LightningCLI

    from flowtrain_lightning.data import FlowDataModule
    from flowtrain_lightning.module import FlowModule

    sys.path.insert(0, str(Path.cwd()))
    LightningCLI(
        FlowModule,
        FlowDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        auto_configure_optimizers=False,
        save_config_kwargs={"overwrite": True},
        args=arguments,
    )


def export(arguments: list[str]) -> None:
    """Write a checkpoint directory as one plain Lightning ``.ckpt`` file.

    Args:
        arguments: ``export``, the checkpoint and the file to write.

    Raises:
        UsageError: if there is no such checkpoint, the file exists or its folder does not.
    """
    parser = argparse.ArgumentParser(prog="flowtrain export", description=COMMANDS["export"][1])
    parser.add_argument("checkpoint", type=Path, help="a checkpoint directory that flowtrain wrote")
    parser.add_argument("out", type=Path, metavar="out.ckpt", help="the file to write; it must not exist")
    options = parser.parse_args(arguments[1:])
    if not options.checkpoint.is_dir():
        raise UsageError(f"{options.checkpoint} is no checkpoint directory.")
    if options.out.exists():
        raise UsageError(f"{options.out} exists; choose another name.")
    if not options.out.parent.is_dir():
        raise UsageError(f"there is no folder {options.out.parent} to write {options.out.name} into.")
    from flowtrain_lightning.checkpoint import export_checkpoint

    export_checkpoint(options.checkpoint, options.out)
    print(f"Wrote {options.out} ({options.out.stat().st_size / 2**20:.1f} MiB).")


def doctor(arguments: list[str]) -> None:
    """Print what this machine offers, one line each.

    Args:
        arguments: ``doctor``, which takes no options.
    """
    argparse.ArgumentParser(prog="flowtrain doctor", description=COMMANDS["doctor"][1]).parse_args(arguments[1:])
    for finding in examine():
        print(finding)


COMMANDS: dict[str, tuple[Callable[[list[str]], None], str]] = {
    "fit": (train, "train and validate"),
    "validate": (train, "one pass over the validation set"),
    "test": (train, "one pass over the test set"),
    "predict": (train, "run predict_step over a set"),
    "export": (export, "write a checkpoint directory as one plain Lightning .ckpt file"),
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
