"""The command ``flowtrain``: Lightning's subcommands for a FlowModule, and those of this package."""

from __future__ import annotations

import os
import sys
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import version
from io import TextIOWrapper

from flowtrain_lightning.cli.command_table import COMMANDS, UsageError


def main() -> None:
    """Run the command that the command line names."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a letter shows a question mark
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print(_help())
    elif name == "--version":
        print(f"flowtrain-lightning {version('flowtrain-lightning')}")
    elif name in COMMANDS:
        _run(name)
    else:
        near = get_close_matches(name, COMMANDS, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        sys.exit(f"flowtrain: there is no command {name!r}.{hint} Choose from {', '.join(COMMANDS)}.")


def _run(name: str) -> None:
    command = COMMANDS[name]
    module = import_module(f"flowtrain_lightning.cli.{command.module}")
    try:
        module.run()
        sys.stdout.flush()
    except (UsageError, *module.MISTAKES) as error:
        sys.exit(f"flowtrain {name}: {error}")
    except KeyboardInterrupt:
        sys.exit(130)  # as shells report a command that Ctrl-C ended
    except OSError as error:
        if command.starts_ranks:  # whose processes may have lost each other
            raise
        if error.filename is None:  # the output: the interpreter would try once more at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        reader_is_gone = isinstance(error, BrokenPipeError)  # `head`, for one, has read what it wanted
        what = error.filename or "what it prints"
        sys.exit(1 if reader_is_gone else f"flowtrain {name}: {what} cannot be read or written: {error.strerror}.")


def _help() -> str:
    commands = [f"  {name:<10} {command.meaning}" for name, command in COMMANDS.items()]
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
