"""Lightning's announcements, kept back where a Trainer is made that trains nothing of the user's."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Inside, Lightning announces and advises nothing: it would be taken for what it says of the training."""
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning")
            yield
    finally:
        log.setLevel(level)
