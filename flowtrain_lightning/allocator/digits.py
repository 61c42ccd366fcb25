"""Numbers in text: as many digits as count, and never an exponent."""

from __future__ import annotations

from math import floor, log10


def in_digits(number: float, digits: int) -> str:
    """A number of at least 0 in so many digits: ``1,230``, ``12.3`` and ``0.00123`` in three."""
    if number == 0:
        return "0"
    exact = float(f"{number:.{digits - 1}e}")
    text = f"{exact:,.{max(0, digits - 1 - floor(log10(exact)))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
