"""The command ``flowtrain export``: a checkpoint directory as one plain Lightning file."""

from __future__ import annotations

import sys
from pathlib import Path

from flowtrain_lightning.checkpoint import export_checkpoint
from flowtrain_lightning.cli.command_table import UsageError, command_parser

MISTAKES = ()


def run() -> None:
    """Write a checkpoint directory as one plain Lightning ``.ckpt`` file.

    Raises:
        UsageError: the directory is no checkpoint, or the file exists or cannot be written.
    """
    parser = command_parser("export")
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
