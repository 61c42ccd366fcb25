"""Tables of text with aligned columns, for terminals and logs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

_WIDEST = 1000
"""Letters of a line that a table may have: logs have no width, and terminals break lines by themselves."""


def text_table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Aligned columns under their headings, the first column flush left."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for number, name in enumerate(head):
        table.add_column(Text(name), justify="right" if number else "left", no_wrap=True)
    for cells in lines:
        table.add_row(*map(Text, cells))
    paper = Console(width=_WIDEST, color_system=None)
    with paper.capture() as printed:
        paper.print(table)
    return "\n".join(line.rstrip() for line in printed.get().splitlines())


def counted(count: int, what: str) -> str:
    """So many of something: ``1 device``, ``1,024 devices``, ``2 batches``."""
    return f"{count:,} {what}" + ("" if count == 1 else "es" if what.endswith("ch") else "s")
