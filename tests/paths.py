"""Where the repository lies, and where processes that tests start look for modules."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


def python_path() -> str:
    """A ``PYTHONPATH``: the repository first, then what this process was given, where packages may lie."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
