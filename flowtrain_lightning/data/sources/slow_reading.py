"""Names what is being read where it takes long: its source is slow, or hangs."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SLOW_SECONDS = 60.0
"""After which what has not come is named."""

_log = logging.getLogger("lightning.pytorch")  # whose messages of ranks other than 0 are shown, too


@contextmanager
def named_if_slow(awaited: Callable[[], str]) -> Iterator[None]:
    """Inside something is read; it is named once if it has not come after :data:`SLOW_SECONDS`.

    Args:
        awaited: the beginning of the sentence at that moment, such as "stream Rows has not given its row 4".
    """
    slow = threading.Timer(SLOW_SECONDS, lambda: _log.warning(_SLOW, awaited(), SLOW_SECONDS))
    slow.daemon = True
    slow.start()
    try:
        yield
    finally:
        slow.cancel()


_SLOW = "%s within %.3g s. Its source is slow, or hangs."
