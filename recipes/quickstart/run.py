"""The quickstart from end to end: how long it will take, the training, what was learned. `make quickstart` calls it.

    python -m recipes.quickstart.run [options of `flowtrain fit`]

The training starts this command once more for every other rank, and once to measure the halves of the model.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from pathlib import Path

from flowtrain_lightning.cli.train_command import configured
from recipes.quickstart import estimate, report

CONFIG = "recipes/quickstart/config.yaml"

_BEGUN = "QUICKSTART_BEGUN"
"""Environment variable of the processes that the first one starts: when that began, on the clock of the machine."""


def main() -> None:
    """Train by the configuration, with options from the command line on top, and say what came out."""
    silence_other_packages()
    if _BEGUN not in os.environ:
        start_seconds = time.process_time()  # of the imports
        os.environ[_BEGUN] = str(time.monotonic() - start_seconds)
        print("A small vision-language model will train on two processes of this machine. How long? ...", flush=True)
        print(estimate.sentence(start_seconds), flush=True)
    training = configured(args=["fit", "--config", CONFIG, *sys.argv[1:]], save_config_kwargs={"overwrite": True})
    seconds = time.monotonic() - float(os.environ[_BEGUN])
    report.look(Path(training.trainer.log_dir or report.RUN), seconds)


def silence_other_packages() -> None:
    """Shows no remarks and warnings of other packages, which mean nothing to whoever tries this one."""
    warnings.filterwarnings("ignore", module="lightning|torch|jsonargparse|matplotlib")
    for name in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed"):
        logging.getLogger(name).addFilter(_is_ours)


def _is_ours(record: logging.LogRecord) -> bool:
    return record.getMessage().startswith("flowtrain") or record.levelno > logging.WARNING


if __name__ == "__main__":
    main()
