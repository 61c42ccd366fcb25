"""Thousands of trials, each drawn from its number: run in pieces, noted piece by piece, gone on with where stopped."""

from __future__ import annotations

import argparse
import json
import subprocess
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "tests/results"

PIECE = 250
"""So many trials make one line of the results. To run some of them again, take their line out."""


def main(what: str, trial: Callable[[int], str]) -> int:
    """Runs the trials that were not run yet: the command line of a module that has such.

    Args:
        what: is tried, in the plural; the results are kept under this name.
        trial: runs the trial of a number, and says in a word or two what became of it. An exception says what was
            not as promised.

    Returns:
        the exit code: 1 where something was not as promised, in this run or before.
    """
    parser = argparse.ArgumentParser(description=f"Runs the trials of {what} that were not run yet.")
    parser.add_argument("--of", type=int, default=10_000, help="trials in all")
    parser.add_argument("--results", type=Path, default=RESULTS / f"{what.replace(' ', '-')}.jsonl")
    options = parser.parse_args()
    options.results.parent.mkdir(parents=True, exist_ok=True)
    lines = options.results.read_text().splitlines() if options.results.exists() else []
    done = {each["first"]: each for each in map(json.loads, lines)}
    with options.results.open("a") as results:
        for first in range(0, options.of, PIECE):
            if first not in done:
                done[first] = run_piece(trial, first, min(PIECE, options.of - first))
                print(json.dumps(done[first]), file=results, flush=True)
                print(_standing(what, list(done.values()), options.of), flush=True)
    print(f"{_standing(what, list(done.values()), options.of)}. See {options.results}.")
    return int(any(each["not as promised"] for each in done.values()))


def run_piece(trial: Callable[[int], str], first: int, count: int) -> dict[str, Any]:
    """So many trials from a number on, as a line of the results."""
    became: Counter[str] = Counter()
    complaints: dict[int, str] = {}
    for number in range(first, first + count):
        try:
            became[trial(number)] += 1
        except Exception as error:
            complaints[number] = "".join(traceback.format_exception(error)[-2:])[-2000:]
    return {
        "first": first,
        "trials": count,
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": commit(),
        "became": dict(sorted(became.items())),
        "not as promised": complaints,
    }


def commit() -> str:
    """The commit that is checked out, for results to name."""
    command = ["git", "log", "-1", "--format=%h"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def _standing(what: str, pieces: list[dict[str, Any]], of: int) -> str:
    became = sum((Counter(each["became"]) for each in pieces), Counter())
    complaints = sum(len(each["not as promised"]) for each in pieces)
    trials = sum(each["trials"] for each in pieces)
    counts = ", ".join(f"{count:,} {verdict}" for verdict, count in sorted(became.items()))
    return f"{trials:,} of {of:,} {what} done, {complaints} not as promised; {counts}"
