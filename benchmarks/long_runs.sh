#!/usr/bin/env bash
# The measurements that need a machine with nothing else to do: about two hours on two cores. Results go to benchmarks/results/.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-.venv/bin/python}"

"$PYTHON" benchmarks/layouts.py                                        # 7 rounds, about 40 minutes
"$PYTHON" benchmarks/projected.py                                      # about 30 minutes
"$PYTHON" benchmarks/train.py --emulate 8 --rounds 5 --steps 16        # about 5 minutes
"$PYTHON" benchmarks/emulate_layouts.py                                # about 40 minutes
"$PYTHON" benchmarks/long_samples.py                                   # about 45 minutes
"$PYTHON" benchmarks/emulated_plans.py                                 # about 45 minutes
"$PYTHON" benchmarks/train.py                                          # about 35 minutes
