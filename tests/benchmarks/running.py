"""Runs a script of `benchmarks/` as one does by hand, at a tiny size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def run(script: str, out: Path, *options: str, deadline: float = 600) -> str:
    """What the script prints; its results go to ``out``. It fails after ``deadline`` seconds."""
    command = [sys.executable, str(BENCHMARKS / script), "--quick", "--out", str(out), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=deadline, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
