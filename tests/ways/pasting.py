"""What somebody does who has the pages alone: paste their blocks into files and a terminal, and run them."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from tests.lightning.layout_runs import launch
from tests.paths import ROOT

SECONDS = 900
"""The longest that one command may take, on a machine that does much other work."""

_PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"


def blocks(page: str, language: str, heading: str = "") -> list[str]:
    """The blocks of a language on a page: all, or those below one of its headings.

    Args:
        page: its path in the repository.
        language: as the fence of a block says it.
        heading: its text; what is below ends where the next heading of its level, or of one above, begins.
    """
    text = (ROOT / page).read_text(encoding="utf-8")
    if heading:
        level, text = re.findall(rf"^(#+) {re.escape(heading)}\n(.*)", text, flags=re.MULTILINE | re.DOTALL)[0]
        text = re.split(rf"^#{{1,{len(level)}}} ", text, maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(rf"^```{language}\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def commands(page: str, heading: str = "") -> list[str]:
    """The commands of a page's terminal blocks, one each."""
    return [line for block in blocks(page, "bash", heading) for line in block.splitlines() if line and line[0] != "#"]


def adapted(text: str, own: dict[str, str]) -> str:
    """A block with somebody's own values in place of the page's, each of which must stand in it."""
    for theirs, ours in own.items():
        assert theirs in text, f"{theirs!r} is not on the page:\n{text}"
        text = text.replace(theirs, ours)
    return text


def run(folder: Path, command: str, **variables: str) -> str:
    """Types a command in a folder.

    Args:
        folder: where.
        command: that bash understands.
        variables: of the environment, beside the present ones.

    Returns:
        what it printed. It must end by itself, in time and without an error; nothing of it stays behind.
    """
    log = folder / "terminal.log"
    with launch(["bash", "-euo", "pipefail", "-c", command], log, PATH=_PATH, HF_HUB_OFFLINE="1", **variables) as typed:
        code = typed.wait(SECONDS)
    said = log.read_text(errors="replace")
    assert code == 0, f"{command}\nended with {code}:\n{said[-6000:]}"
    return said


def paste(folder: Path, place: str, script: str) -> None:
    """Runs a pasted script in a folder, in a forked process; see `tests.forks.Job`."""
    os.chdir(place)
    exec(script, {"__name__": "__main__"})
