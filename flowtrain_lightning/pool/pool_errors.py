"""Errors of the pool, whose text says what was given, what was expected and what to do."""

from __future__ import annotations


class PoolError(RuntimeError):
    """The pool cannot do what it was asked to."""


class PeerFailed(PoolError):
    """A peer died or failed, so that nothing more can be expected of it.

    Attributes:
        rank: the peer that is to blame, or None where no single rank is.
    """

    def __init__(self, sentence: str, rank: int | None = None) -> None:
        super().__init__(sentence)
        self.rank = rank
