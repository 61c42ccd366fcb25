"""The command ``flowtrain``: ``command.py`` knows its subcommands; those with much to do have files of their own."""

from flowtrain_lightning.cli.command import COMMANDS, main

__all__ = ["COMMANDS", "main"]
