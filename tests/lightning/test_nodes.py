"""A Trainer on two nodes, each a host with a network of its own, does what it does on one."""

from __future__ import annotations

import json
import os
import signal
import sys
from contextlib import ExitStack

import pytest
import torch

from flowtrain_lightning import PoolSettings
from tests.exactness.compare import error, read_run, same_bits
from tests.exactness.data import STEPS, write_steps
from tests.forks import Job, run_jobs
from tests.hosts import ADDRESSES, Hosts, on_host, why_not
from tests.lightning.layout_runs import launch
from tests.lightning.nodes import PORT, RANKS
from tests.pool.faults import slowness
from tests.pool.ranks import NIXL

pytestmark = pytest.mark.timeout(1000)

SECONDS = 300
"""The longest that a run may take on a busy machine."""

SEPARATE = {"encoder_ranks": 2}

ROUNDING = 1e-10
"""The largest relative error that sums of float64 in another order may make of weights in a few steps of Adam."""


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


def play(folder, name, function="train", **arguments):
    job = Job(name, f"tests.lightning.nodes:{function}", RANKS, arguments, SECONDS)
    return run_jobs(folder, [job])[name]


def train(folder, name, data, nodes, strategy=SEPARATE, **arguments):
    """What a run gave that ended well."""
    where = {"nodes": nodes, "tester": os.getpid()} if nodes > 1 else {}
    return read_run(play(folder, name, data=data, strategy=strategy, **where, **arguments).check().folder)


@pytest.fixture(scope="module")
def on_one_node(tmp_path_factory, data):
    return train(tmp_path_factory.mktemp("one"), "one node", data, nodes=1)


@pytest.fixture(scope="module")
def on_two_nodes(tmp_path_factory, data, hosts):
    return train(tmp_path_factory.mktemp("two"), "two nodes", data, nodes=2)


def test_two_nodes_compute_what_one_computes(on_two_nodes, on_one_node):
    assert on_two_nodes.microbatches == on_one_node.microbatches
    assert on_two_nodes.losses[0] == on_one_node.losses[0], "to the bit"
    for on_two, on_one in zip(on_two_nodes.weights, on_one_node.weights, strict=True):
        assert error(on_two, on_one) < ROUNDING


def test_who_encodes_follows_from_the_nodes(on_two_nodes, on_one_node):
    assert on_two_nodes.encoder_batches != on_one_node.encoder_batches, "so that encoder gradients are summed otherwise"


@pytest.mark.full
@pytest.mark.parametrize("network", [NIXL])
def test_another_way_of_the_pool_between_nodes_changes_no_bit(hosts, data, tmp_path, on_two_nodes, network):
    strategy = {**SEPARATE, "pool": PoolSettings(network=network)}
    assert same_bits(train(tmp_path, network, data, nodes=2, strategy=strategy), on_two_nodes)


@pytest.mark.full
def test_colocated_ranks_of_two_nodes_do_so_too(hosts, data, tmp_path):
    one, two = [train(tmp_path, f"{nodes}", data, nodes, strategy={"placement": "colocated"}) for nodes in (1, 2)]
    assert error(two.weights[-1], one.weights[-1]) < ROUNDING


@pytest.mark.full
def test_the_variables_that_srun_sets_are_understood(hosts, data, tmp_path, on_two_nodes):
    assert same_bits(train(tmp_path, "srun", data, nodes=2, started_by="srun"), on_two_nodes)


@pytest.mark.full
def test_a_checkpoint_of_two_nodes_goes_on_on_two_and_on_one(hosts, data, tmp_path, on_two_nodes):
    train(tmp_path, "saves", data, nodes=2, save_at=3)
    saved = str(tmp_path / "saves" / "saved.ckpt")
    for nodes, most in ((2, 0.0), (1, ROUNDING)):
        resumed = train(tmp_path, f"goes on on {nodes}", data, nodes, resume=saved)
        assert len(resumed.losses) == STEPS - 3
        assert error(resumed.weights[-1], on_two_nodes.weights[-1]) <= most


@pytest.mark.full
def test_a_rank_that_dies_ends_both_nodes_in_time_with_its_name_role_and_host(hosts, data, tmp_path):
    where = {"nodes": 2, "tester": os.getpid()}
    done = play(tmp_path, "dies", data=data, strategy=SEPARATE, dies=(3, 2), **where)
    assert done.codes == [1, 1, 1, -signal.SIGKILL], done.log
    for rank in range(3):
        fault = done.folder / f"fault-rank{rank}.txt"
        assert fault.read_text().startswith("Rank 3 (encoder 1 on host-1) died"), done.log
        assert fault.stat().st_mtime - (done.folder / "died").stat().st_mtime < 5 * slowness()


@pytest.mark.full
@pytest.mark.parametrize(("checks_at_start", "steps"), [(True, 0), (False, 2)], ids=["at the start", "when it saves"])
def test_a_folder_that_the_nodes_do_not_share_is_told(hosts, data, tmp_path, checks_at_start, steps):
    job = {"data": data, "tester": os.getpid(), "checks_at_start": checks_at_start}
    done = play(tmp_path, "unshared", "train_without_a_shared_folder", **job)
    assert done.codes == [1, 1, 1, 1], done.log
    for rank in range(RANKS):
        printed = (done.folder / f"rank{rank}.log").read_text()
        assert f"Ranks 2, 3 cannot see what rank 0 writes into {done.folder / 'kept'}" in printed
        assert torch.load(done.folder / f"rank{rank}.pt", weights_only=True) == {"step": steps, "left": []}


@pytest.mark.full
def test_data_that_differ_between_the_nodes_are_told(hosts, data, tmp_path):
    done = play(tmp_path, "other data", "train_on_other_data", data=data, tester=os.getpid())
    assert done.codes == [1, 1, 1, 1], done.log
    for rank in range(RANKS):
        assert "Ranks 2, 3 would read other data than rank 0" in (done.folder / f"rank{rank}.log").read_text()


def start_on_both(folder, data, command, *encoder_ranks, **variables):
    """Runs the script on both hosts, by a command that gets the node's number."""
    script = ["-m", "tests.lightning.nodes", str(folder), data, *encoder_ranks]
    with ExitStack() as stack:
        started = []
        for node in (0, 1):
            own = {name: value.format(node=node) for name, value in variables.items()}
            words = [word.format(node=node) for word in command]
            whole = on_host(node, [sys.executable, *words, *script])
            started.append(stack.enter_context(launch(whole, folder / f"log{node}", **own)))
        codes = [process.wait(SECONDS) for process in started]
    printed = [(folder / f"log{node}").read_text() for node in (0, 1)]
    assert codes == [0, 0], "\n".join(printed)
    return printed


@pytest.mark.full
def test_torchrun_starts_the_ranks_of_both_nodes(hosts, data, tmp_path, on_two_nodes):
    meeting = [f"--master-addr={ADDRESSES[0]}", f"--master-port={PORT}", "--node-rank={node}"]
    command = ["-m", "torch.distributed.run", "--nnodes=2", f"--nproc-per-node={RANKS // 2}", *meeting]
    printed = start_on_both(tmp_path, data, command, "2")
    assert same_bits(read_run(tmp_path), on_two_nodes)
    assert (
        "pool: ranks 0-1 by shared memory; ranks 2-3 by shared memory; between these 2 hosts by network" in printed[0]
    )


@pytest.mark.full
def test_lightnings_launcher_starts_those_of_its_node_and_rank_0_plans_for_all(hosts, data, tmp_path, on_one_node):
    meeting = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": PORT, "NODE_RANK": "{node}"}
    printed = start_on_both(tmp_path, data, [], **meeting)
    settled = [json.loads((tmp_path / f"settled{rank}.json").read_text()) for rank in range(RANKS)]
    assert "is predicted to be" in settled[0]["reason"]
    assert [each["ranks"] for each in settled] == [settled[0]["ranks"]] * RANKS
    assert "".join(printed).count("measuring the halves of TinyVLM") == 1
    assert read_run(tmp_path).losses == pytest.approx(on_one_node.losses, rel=1e-9)
