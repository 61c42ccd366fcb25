"""The quickstart from end to end: train, then report. `make quickstart` calls this.

python recipes/quickstart/run.py [options of `flowtrain fit`]
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
FLOWTRAIN = Path(sys.executable).with_name("flowtrain")
CONFIG = "recipes/quickstart/config.yaml"


def main() -> None:
    """Train by the configuration, with options from the command line on top, and say what came out."""
    started = time.monotonic()
    run([str(FLOWTRAIN), "fit", "--config", CONFIG, *sys.argv[1:]])
    trained = time.monotonic()
    print(f"\nTrained in {trained - started:.0f} s. Now looking at what was learned ...\n", flush=True)
    run([sys.executable, "-m", "recipes.quickstart.report"])
    print(f"\nAll of it took {time.monotonic() - started:.0f} s.")


def run(command: list[str]) -> None:
    """Run a command in the repository's root; end with its exit code if it fails."""
    finished = subprocess.run(command, cwd=ROOT)
    if finished.returncode != 0:
        sys.exit(finished.returncode)


if __name__ == "__main__":
    main()
