"""Numbers in text."""

from __future__ import annotations

import pytest

from flowtrain_lightning.allocator.digits import in_digits


@pytest.mark.parametrize(
    ("number", "digits", "text"),
    [
        (0, 3, "0"),
        (0.0012345, 3, "0.00123"),
        (2.0, 4, "2"),
        (9.996, 3, "10"),
        (12.349, 3, "12.3"),
        (999.96, 4, "1,000"),
        (12345.6, 4, "12,350"),
        (1.5e7, 3, "15,000,000"),
    ],
)
def test_as_many_digits_as_count_are_written_and_never_an_exponent(number, digits, text):
    assert in_digits(number, digits) == text
