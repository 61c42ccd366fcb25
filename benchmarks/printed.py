"""A time or a gain that a paper prints, beside what is predicted of it."""

from __future__ import annotations

from dataclasses import dataclass

TIE = 0.03
"""Gains below are on par."""


@dataclass(frozen=True)
class Prediction:
    """A figure in seconds, printed and predicted."""

    source: str
    what: str
    printed: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over printed, minus 1."""
        return self.predicted / self.printed - 1


@dataclass(frozen=True)
class Sign:
    """A gain of one placement over another, printed and predicted."""

    what: str
    printed: float
    predicted: float

    @property
    def right(self) -> bool:
        """Whether the side that is predicted to be faster is; or, where print has both on par, whether they are."""
        if abs(self.printed) < TIE:
            return abs(self.predicted) < TIE
        return (self.printed > 0) == (self.predicted > 0)

    @property
    def noticed(self) -> bool:
        """Whether the winner is right, and by a gap that is not on par where print's is not."""
        return self.right and (abs(self.printed) < TIE) == (abs(self.predicted) < TIE)
