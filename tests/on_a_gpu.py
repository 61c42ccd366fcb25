"""The tests that need a GPU, and only those: ``python -m tests.on_a_gpu``, in any environment that can run the tests.

Each part is a process of its own, which has not used CUDA before; where one fails or hangs, the others run all the
same. What they print is printed as it comes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from tests.trials import ROOT

PARTS = {
    "doctor": ("-c", "from flowtrain_lightning.cli import main; main()", "doctor"),
    "attention": ("-m", "pytest", "-q", "tests/test_attention.py", "-k", "cuda"),
    "masks": (
        "-m",
        "pytest",
        "-q",
        "tests/models/test_block_attention.py",
        "tests/models/test_block_tables.py",
        "-k",
        "cuda",
    ),
    "pool": ("-m", "pytest", "-q", "tests/pool/device/test_cuda_ipc.py"),
    "training": ("-m", "pytest", "-q", "tests/models/test_on_a_gpu.py"),
}
"""Name -> arguments of the interpreter."""

DEADLINE = 300.0
"""Seconds for one part."""

# Who asks whether there is a GPU then makes no context of CUDA, which no fork of the process could use.
_ENVIRONMENT = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "PYTHONUNBUFFERED": "1"}


def main() -> int:
    """Runs all parts; returns 1 where one failed."""
    ended: dict[str, str] = {}
    for name, arguments in PARTS.items():
        print(f"== {name}", flush=True)
        start = time.monotonic()
        try:
            code = subprocess.run(
                [sys.executable, *arguments], cwd=ROOT, env=os.environ | _ENVIRONMENT, timeout=DEADLINE, check=False
            ).returncode
            ended[name] = "passed" if code == 0 else f"failed with code {code}"
        except subprocess.TimeoutExpired:
            ended[name] = "took too long"
        ended[name] += f" after {time.monotonic() - start:.0f} s"
    print("\n".join(f"{name}: {how}" for name, how in ended.items()), flush=True)
    return int(any(not how.startswith("passed") for how in ended.values()))


if __name__ == "__main__":
    sys.exit(main())
