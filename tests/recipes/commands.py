"""A command of `flowtrain` as a job of forked ranks."""

from __future__ import annotations

import sys
from pathlib import Path

import peft  # noqa: F401  what ranks would import, each anew
import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl  # noqa: F401

from flowtrain_lightning.cli import main


def flowtrain(folder: Path, arguments: list[str]) -> None:
    """This rank's part of ``flowtrain ARGUMENTS``."""
    sys.argv = ["flowtrain", *arguments]
    main()
