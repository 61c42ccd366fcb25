"""What to run first on a machine with a GPU, in three calls: ``python -m tests.on_a_gpu 1``, then 2 and 3.

Each call ends within ten minutes, as machines are lent; without a number all three follow each other. It takes any
environment that can run the tests. Each part is a process of its own, which has not used CUDA before; where one fails
or hangs, the others run all the same. What they print is printed as it comes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

from tests.paths import ROOT, python_path

Arguments = tuple[str, ...]

_PYTEST = ("-m", "pytest", "-q")
_BESIDE_EACH_OTHER = (*_PYTEST, "-n", "8", "--dist", "loadgroup")
CALLS: dict[str, dict[str, Arguments]] = {
    "1": {
        "doctor": ("-c", "from flowtrain_lightning.cli import main; main()", "doctor"),
        "probes": ("-m", "benchmarks.probe_gpu"),
        "attention": (*_PYTEST, "tests/test_attention.py", "-k", "cuda"),
        "pool": (*_PYTEST, "tests/pool/device/test_cuda_ipc.py"),
    },
    "2": {
        "training": (*_BESIDE_EACH_OTHER, "tests/models/test_on_a_gpu.py"),
        "layouts": (
            *_BESIDE_EACH_OTHER,
            *(
                f"tests/exactness/test_{kind}.py"
                for kind in ("layouts", "stages", "searched_order", "drawing", "shared")
            ),
            *("-m", "not full", "-k", "not ddp"),  # plain DDP wants a card for each rank
        ),
        "masks": (
            *_PYTEST,
            "tests/models/test_block_attention.py",
            "tests/models/test_block_tables.py",
            "-k",
            "cuda",
        ),
    },
    "3": {
        "speed": (
            "-m",
            "benchmarks.gpu",
            *("--minutes", "8", "--rounds", "1"),
            *("--variants", "loop", "auto", "colocated", "separate"),
        ),
    },
}
"""Call -> its parts by name, and the arguments that the interpreter gets for each."""

SECONDS = 590.0
"""Of one call."""

# Who asks whether there is a GPU then makes no context of CUDA, which no fork of the process could use.
_ENVIRONMENT = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "PYTHONUNBUFFERED": "1", "EXACTNESS_DEVICE": "cuda"}


def main() -> int:
    """Runs the calls that were asked for; returns 1 where a part failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("call", nargs="?", choices=list(CALLS), help="all, where none is named")
    asked = parser.parse_args().call
    ended: dict[str, str] = {}
    for call in CALLS if asked is None else (asked,):
        ended |= run_parts(CALLS[call], SECONDS)
    print("\n".join(f"{name}: {how}" for name, how in ended.items()), flush=True)
    return int(any(not how.startswith("passed") for how in ended.values()))


def run_parts(parts: dict[str, Arguments], seconds: float) -> dict[str, str]:
    """How each part ended; those for which no time is left do not begin."""
    ended: dict[str, str] = {}
    until = time.monotonic() + seconds
    for name, arguments in parts.items():
        print(f"== {name}", flush=True)
        start = time.monotonic()
        if start >= until:
            ended[name] = "not begun: no time was left"
            continue
        try:
            code = subprocess.run(
                [sys.executable, *arguments],
                cwd=ROOT,
                env=os.environ | _ENVIRONMENT | {"PYTHONPATH": python_path()},
                timeout=until - start,
                check=False,
            ).returncode
            ended[name] = "passed" if code == 0 else f"failed with code {code}"
        except subprocess.TimeoutExpired:
            ended[name] = "took too long"
        ended[name] += f" after {time.monotonic() - start:.0f} s"
    return ended


if __name__ == "__main__":
    sys.exit(main())
