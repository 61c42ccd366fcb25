"""A process that speaks to Ray for a rank: it starts Ray on this machine and ends it, or asks a cluster what it has.

Run as a script of its own, by `ray_cluster.py`: a rank that imported Ray would have Ray's handler of SIGTERM and its
threads, and would end with it.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from typing import Any


def main() -> None:
    """Write one line of JSON, then wait for the end of a Ray that was started; its folder is then removed, too."""
    settings = json.loads(sys.argv[1])
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever Ray prints
    folder = settings.get("_temp_dir")
    try:
        found = _connected(**settings)
        answer.write(json.dumps(found) + "\n")
        answer.close()
        if folder is not None and "error" not in found:
            sys.stdin.read()  # until the rank closes it, or ends
            import ray

            ray.shutdown()
    finally:
        if folder is not None:
            shutil.rmtree(os.path.dirname(folder), ignore_errors=True)


def _connected(**settings: Any) -> dict[str, Any]:
    """The address of Ray and how many processors it has, or why there is none."""
    import ray

    try:
        ray.init(log_to_driver=False, configure_logging=False, **settings)
        processors = int(ray.cluster_resources().get("CPU", 0))
        return {"address": ray.get_runtime_context().gcs_address, "processors": processors}
    except Exception as error:  # Ray raises what its parts raise: it is told in the rank, whatever it is
        return {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main()
