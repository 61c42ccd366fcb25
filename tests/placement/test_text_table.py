"""Tables in terminals and logs."""

from __future__ import annotations

from flowtrain_lightning.placement.text_table import text_table


def test_columns_are_aligned_under_their_headings_the_first_one_flush_left():
    lines = text_table(("", "s/step", "a [heading]"), [("> one", "10.5", "x"), ("  other", "2", "[bold]")]).splitlines()
    assert lines == ["         s/step  a [heading]", "> one      10.5            x", "  other       2       [bold]"]


def test_a_wide_table_is_not_cut():
    (_, line) = text_table([f"column {number}" for number in range(50)], [["value"] * 50]).splitlines()
    assert line.split() == ["value"] * 50
