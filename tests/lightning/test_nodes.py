"""A Trainer on two nodes, each a host with a network of its own, does what it does on one."""

from __future__ import annotations

import os

import pytest

from tests.exactness.compare import read_run, same_bits
from tests.exactness.data import write_steps
from tests.forks import Job, run_jobs
from tests.hosts import Hosts, why_not
from tests.lightning.nodes import RANKS


@pytest.fixture(scope="module")
def hosts():
    if reason := why_not():
        pytest.skip(f"no hosts can be made of network namespaces here: {reason}")
    with Hosts() as made:
        yield made


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_steps(folder)
    return str(folder)


def train(folder, name, **arguments):
    arguments |= {"tester": os.getpid()} if arguments.get("nodes") == 2 else {}
    return run_jobs(folder, [Job(name, "tests.lightning.nodes:train", RANKS, arguments, 120)])[name]


@pytest.mark.parametrize(
    "strategy", [{"encoder_ranks": 2}, pytest.param({"placement": "colocated"}, marks=pytest.mark.full)], ids=str
)
def test_two_nodes_compute_what_one_computes_to_the_bit(hosts, data, tmp_path, strategy):
    runs = [
        read_run(train(tmp_path, f"{n} nodes", data=data, strategy=strategy, nodes=n).check().folder) for n in (1, 2)
    ]
    assert same_bits(*runs)
