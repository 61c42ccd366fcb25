"""A Ray cluster of two nodes, each a host with a network of its own: the one that has no rank makes the steps."""

from __future__ import annotations

import os
import sysconfig
import venv
from importlib.metadata import version
from pathlib import Path

import pytest

from flowtrain_lightning.data import DataError
from tests.data.ray_runs import cluster_of_hosts, produced
from tests.data.support import read, write_set
from tests.exactness.compare import read_run, same_bits
from tests.exactness.data import write_steps
from tests.exactness.layouts import ranks_of
from tests.exactness.train import train
from tests.forks import Job, read_down, run_jobs, write_down
from tests.hosts import Hosts, enter, why_not

pytestmark = [pytest.mark.full, pytest.mark.timeout(1000)]

LAYOUT = "1+1"


@pytest.fixture(scope="module", autouse=True)
def hosts():
    if reason := why_not():
        pytest.skip(f"no hosts can be made of network namespaces here: {reason}")
    with Hosts() as made:
        yield made


class Noting:
    """Changes no picture, and notes on which host it was asked to.

    Args:
        file: has a line for each picture.
    """

    def __init__(self, file: Path) -> None:
        self.told = file

    def __call__(self, image, _):
        with self.told.open("a") as file:
            file.write(f"{os.uname().nodename}\n")
        return image


def train_on_first_host(folder, *, data, tester, variables):
    """Trains, and has the steps made by the cluster that ``variables`` name, if they do."""
    enter(0, tester)
    os.environ |= variables
    producers = {"producers": "ray", "num_workers": 1} if variables else {}
    train(folder, data=data, layout=LAYOUT, settings={"augment": Noting(folder / "hosts"), **producers})


def read_on_first_host(folder, *, file, tester, variables):
    """Reads until an error says why it cannot, and writes that down."""
    enter(0, tester)
    os.environ |= variables
    with produced(Path(file), num_workers=1) as (loader, _):
        try:
            read(loader)
        except DataError as error:
            write_down(folder, str(error))


def test_a_node_without_ranks_makes_all_steps_to_the_same_bits(tmp_path):
    write_steps(tmp_path / "data")
    with cluster_of_hosts() as variables:
        found = {}
        for name, reached in (("local", {}), ("produced", variables)):
            arguments = {"data": str(tmp_path / "data"), "tester": os.getpid(), "variables": reached}
            job = Job(name, f"{__name__}:train_on_first_host", ranks_of(LAYOUT), arguments)
            found[name] = run_jobs(tmp_path, [job])[name].check().folder
    hosts = {name: set((folder / "hosts").read_text().split()) for name, folder in found.items()}
    assert hosts == {"local": {"host-0"}, "produced": {"host-1"}}
    local, produced = (read_run(folder) for folder in found.values())
    assert local.losses == produced.losses
    assert same_bits(local, produced)


def environment_with(folder: Path, package: str, other: str) -> str:
    """An interpreter of an environment of its own: it has what this one has, but another version of a package."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    (site / "others.pth").write_text(f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n")
    told = site / f"{package}-{other}.dist-info"
    told.mkdir()
    (told / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {other}\n")
    return str(folder / "bin/python")


def test_a_node_with_another_version_of_a_package_is_named_with_both(tmp_path):
    file = write_set(tmp_path / "d.jsonl", 18)
    with cluster_of_hosts(environment_with(tmp_path / "environment", "pillow", "1.7.8")) as variables:
        arguments = {"file": str(file), "tester": os.getpid(), "variables": variables}
        job = Job("reads", f"{__name__}:read_on_first_host", 1, arguments)
        done = run_jobs(tmp_path, [job])["reads"].check()
    (told,) = read_down(done.folder)
    assert told == (
        "The producer on host-1 would make other steps than the rank, since it has pillow 1.7.8 (rank: "
        f"{version('pillow')}). Install the same versions on all nodes of the Ray cluster."
    )
