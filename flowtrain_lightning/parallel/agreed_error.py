"""An error that all ranks raise alike, so that none waits for the others, and which says whose it is."""

from __future__ import annotations


class AgreedError(Exception):
    """What went wrong on one rank ends all, and they have agreed on it.

    Attributes:
        rank: on which it went wrong, the first of them where there are several.
    """

    rank: int
