"""The campaign: hundreds of trials, one after another. `make campaign` goes on where it was stopped."""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.faults.trial import draw, run_trial, why_impossible
from tests.trials import RESULTS, commit

KEPT = RESULTS / "campaign.jsonl"
"""One line for each trial: when and at which commit it was run, what happened, and what was not as promised."""

_SHOWN = 2000  # characters of a complaint's beginning, and of its end


def main() -> int:
    """Run the trials that were not run yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--of", type=int, default=1000, help="trials in all")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    parser.add_argument("--results", type=Path, default=KEPT, help="where they are kept")
    options = parser.parse_args()
    known = [json.loads(line) for line in options.results.read_text().splitlines()] if options.results.exists() else []
    done = {each["seed"]: each["complaint"] for each in known}
    options.results.parent.mkdir(parents=True, exist_ok=True)
    with options.results.open("a") as results:
        for seed in range(options.first, options.first + options.of):
            if seed in done:
                continue
            if reason := why_impossible(draw(seed)):
                print(f"{draw(seed)} is left out: {reason}", flush=True)
            else:
                found = _run(seed)
                done[seed] = found["complaint"]
                print(json.dumps(found), file=results, flush=True)
                print(
                    f"{len(done):4} of {options.of} done, {_failed(done)} not as promised; {found['trial']}", flush=True
                )
    print(f"{len(done)} of {options.of} done, {_failed(done)} not as promised. See {options.results}.")
    return int(_failed(done) > 0)


def _run(seed: int) -> dict[str, Any]:
    trial, start = draw(seed), time.monotonic()
    complaint = ""
    with TemporaryDirectory(prefix="campaign-") as folder:
        try:
            run_trial(trial, Path(folder))
        except AssertionError as error:
            complaint = _shortened("".join(traceback.format_exception(error)[-2:]))
    return {
        "seed": seed,
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": commit(),
        "trial": str(trial),
        "seconds": round(time.monotonic() - start, 1),
        "complaint": complaint,
    }


def _shortened(text: str) -> str:
    """Its beginning, which says what was to be so, and its end, where a job said its last words."""
    return text if len(text) <= 2 * _SHOWN else f"{text[:_SHOWN]}\n...\n{text[-_SHOWN:]}"


def _failed(done: dict[int, str]) -> int:
    return sum(map(bool, done.values()))


if __name__ == "__main__":
    sys.exit(main())
