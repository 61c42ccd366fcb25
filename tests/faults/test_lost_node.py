"""What torchrun starts on several nodes goes on after the loss of one: on fewer nodes, or with another in its place."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.faults.fault import Fault
from tests.faults.job import Job
from tests.faults.observing import SCRIPT
from tests.faults.train import STEPS
from tests.hosts import ADDRESSES, Hosts, on_host, why_not

pytestmark = [pytest.mark.full, pytest.mark.timeout(1000)]

SECONDS = 400
"""The longest that all starts may take on a busy machine."""

PER_NODE = 2


@pytest.fixture(scope="module", autouse=True)
def _hosts():
    if reason := why_not():
        pytest.skip(f"no hosts can be made of network namespaces here: {reason}")
    with Hosts():
        yield


def torchrun(job: Job, node: int, nodes: str, **variables: str) -> subprocess.Popen[bytes]:
    """Starts the ranks of a node as its users do, in a session of their own."""
    meeting = [f"--rdzv-endpoint={ADDRESSES[0]}:{job.port}", "--rdzv-backend=c10d", "--rdzv-id=a-job"]
    # The names of these hosts can be looked up nowhere, and what torchrun takes for a lost node should come soon.
    settings = f"is_host={node == 0},last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
    command = ["-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={PER_NODE}", "--max-restarts=3"]
    own = [*meeting, f"--rdzv-conf={settings}", f"--local-addr={ADDRESSES[node]}", str(SCRIPT)]
    with (job.folder / f"said-by-node-{node}").open("ab") as said:
        return subprocess.Popen(
            on_host(node, [sys.executable, *command, *own]),
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            env=os.environ | job.environment() | {"GLOO_SOCKET_IFNAME": f"flow{node}", **variables},
            start_new_session=True,
        )


@contextmanager
def ended(running: list[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Afterwards none of them runs."""
    try:
        yield
    finally:
        for process in running:
            if process.poll() is None:
                process.terminate()  # torchrun ends its ranks
                process.wait(60)


def assert_all_went_on(job: Job, ranks: int) -> None:
    """All ranks came to the end in the second start, from the checkpoint after the second step on."""
    said = "\n".join(path.read_text(errors="replace") for path in sorted(job.folder.glob("said-by-node-*")))
    finished = {path.name: path.read_text() for path in job.folder.glob("rank*.finished")}
    assert finished == {f"rank{rank}.finished": f"{STEPS}\n" for rank in range(ranks)}, said
    began = [int(line) for line in (job.folder / "rank0.steps").read_text().split()]
    assert began == [0, 1, 2, 3, 2, 3, 4, 5], said
    starts = (job.folder / "rank0.pid").read_text().split()
    assert len(starts) == 2, said


def settings() -> dict[str, Any]:
    return {"ranks": 2 * PER_NODE, "ckpt_path": "last"}


def test_it_goes_on_on_the_nodes_that_are_left(job):
    lost = job(Fault("lost node", PER_NODE, "train", step=3), **settings())
    lost.temporary.mkdir()
    running = [torchrun(lost, node, "1:2") for node in (0, 1)]
    with ended(running):
        assert running[1].wait(SECONDS) == -signal.SIGKILL
        running[0].wait(SECONDS)
    assert_all_went_on(lost, PER_NODE)


def test_another_node_takes_the_place_though_it_counts_its_starts_anew(job):
    lost = job(Fault("lost node", PER_NODE, "train", step=3), **settings())
    lost.temporary.mkdir()
    # Else torchrun tells a node that comes later nowhere where the store of the ranks is (PyTorch 2.13).
    apart = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    running = [torchrun(lost, node, "2", **apart) for node in (0, 1)]
    with ended(running):
        assert running[1].wait(SECONDS) == -signal.SIGKILL
        fresh = job(**settings(), port=lost.port, mark=lost.mark)
        running.append(torchrun(fresh, 1, "2", **apart))
        running[0].wait(SECONDS)
    assert_all_went_on(lost, 2 * PER_NODE)


def test_all_nodes_start_again_after_a_kill_though_not_every_node_counts_that_start(job):
    killed = job(Fault("kill", PER_NODE, "train", step=3), **settings())
    killed.temporary.mkdir()
    running = [torchrun(killed, node, "2") for node in (0, 1)]
    with ended(running):
        for process in running:
            process.wait(SECONDS)
    assert_all_went_on(killed, 2 * PER_NODE)
