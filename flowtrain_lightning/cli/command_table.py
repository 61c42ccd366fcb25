"""The commands of ``flowtrain``, and where each is found: a command is imported when it is asked for."""

from __future__ import annotations

import argparse
from dataclasses import dataclass


class UsageError(Exception):
    """The command cannot do what it was asked for; the message says what to do instead."""


@dataclass(frozen=True)
class Command:
    """One command.

    Attributes:
        module: in this folder. Its ``run`` reads the command line and does the work; its ``MISTAKES`` are errors whose
            message says all that a user needs.
        meaning: what the command does.
        starts_ranks: it runs the user's module, so that any error shows where it comes from.
    """

    module: str
    meaning: str
    starts_ranks: bool = False


COMMANDS = {
    "fit": Command("train_command", "train and validate", starts_ranks=True),
    "validate": Command("train_command", "one pass over the validation set", starts_ranks=True),
    "test": Command("train_command", "one pass over the test set", starts_ranks=True),
    "predict": Command("train_command", "run predict_step over a set", starts_ranks=True),
    "export": Command(
        "export_command", "write a checkpoint directory as one Lightning .ckpt file, or as a folder of Hugging Face"
    ),
    "index": Command("index_command", "measure the data ahead of a run, by several processes", starts_ranks=True),
    "check": Command("check_command", "check that packing does not change what a module learns", starts_ranks=True),
    "profile": Command(
        "profile_command",
        "measure how long the halves of a module take on this device, and what its data ask of them",
        starts_ranks=True,
    ),
    "plan": Command(
        "plan_command", "say how to split a module over devices, what a step takes, and whether splitting pays"
    ),
    "simulate": Command(
        "simulate_command", "simulate steps of a plan with measured costs, and say where the time goes"
    ),
    "pack": Command("pack_command", "pack the lengths in a Parquet file into microbatches of equal cost"),
    "doctor": Command(
        "doctor_command", "print what this machine offers: versions, devices, kernel services, attention kernels"
    ),
}
"""Name -> the command."""


def command_parser(name: str) -> argparse.ArgumentParser:
    """A parser for the options of a command, without any yet."""
    return argparse.ArgumentParser(prog=f"flowtrain {name}", description=f"{COMMANDS[name].meaning}.")
