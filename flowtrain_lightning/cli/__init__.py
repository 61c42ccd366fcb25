"""The command ``flowtrain``: ``command.py`` runs it, ``command_table.py`` lists what it can do."""

from flowtrain_lightning.cli.command import main

__all__ = ["main"]
