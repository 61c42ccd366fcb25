"""What every test gets: one thread, no trace of the test before it, and the folder of real data."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported, and for the scripts that tests start
os.environ["FLOWTRAIN_JOB_SECRET"] = "a secret of the tests, which else would be kept in the home folder"

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from lightning_utilities.core.rank_zero import rank_zero_only

import flowtrain_lightning.packing
from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from tests.checked import leave_out_packing_check

_compiling: subprocess.Popen[bytes] | None = None
_cache: str | None = None
_environment: dict[str, str] = {}  # before any test, or a fixture of many tests, has trained in this process

torch.set_num_threads(1)
settings.register_profile("long", deadline=None, derandomize=True, database=None)
settings.register_profile("short", settings.get_profile("long"), max_examples=40)


def pytest_configure(config: pytest.Config) -> None:
    """Before any test: a cache of their own, and the packer's loops are compiled.

    In the cache a fit finds the packing check of one before it. The loops are compiled in a fresh clone: else many
    ranks do so at the same time, each within a deadline.
    """
    global _compiling, _cache
    settings.load_profile("long" if _is_long_form(config) else "short")
    starts_workers_or_tests = not hasattr(config, "workerinput")
    if starts_workers_or_tests:
        os.environ.setdefault("PIP_CACHE_DIR", str(Path.home() / ".cache" / "pip"))  # which the next line would move
        os.environ["XDG_CACHE_HOME"] = _cache = tempfile.mkdtemp(prefix="flowtrain-")
    else:
        sys.modules["__main__"].__file__ = __file__  # a worker has none, and what is typed in keeps no packing check
    folder = Path(flowtrain_lightning.packing.__path__[0])
    if find_spec("numba") is not None and starts_workers_or_tests and not any(folder.glob("__pycache__/*.nbi")):
        _compiling = subprocess.Popen([sys.executable, "-m", "tests.compiling"], cwd=Path(__file__).parents[1])


def _is_long_form(config: pytest.Config) -> bool:
    """Whether this is no run of `make test`."""
    return bool(config.option.markexpr != "not full")


def pytest_unconfigure() -> None:
    """Removes the cache."""
    if _cache is not None:
        shutil.rmtree(_cache, ignore_errors=True)


def _await_compilation() -> None:
    """To be called when all tests are known, and none has begun."""
    if _compiling is not None and _compiling.wait() != 0:
        raise RuntimeError("The packer's loops could not be compiled; see above.")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_node_collection_finished() -> None:
    """A worker knows its tests: it is given some when the loops are compiled."""
    _await_compilation()


def pytest_collection_finish() -> None:
    """Takes down the variables that are there when all tests are known; libraries have set theirs by then.

    What has been imported stays: no collection of garbage looks at it any more.
    """
    _await_compilation()
    _environment.update(os.environ)
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _modules_are_checked_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fits check the packing of their modules in the long form, and in test files marked `checks_packing`."""
    with pytest.MonkeyPatch.context() as patch:
        if not _is_long_form(request.config) and request.node.get_closest_marker("checks_packing") is None:
            leave_out_packing_check(patch)
        yield


@pytest.fixture(autouse=True)
def _no_trace_of_a_trainer() -> Iterator[None]:
    """Puts back what a Trainer in this process leaves behind: process groups, the global rank, environment variables.

    Threads of process groups do not outlive a fork, and `Ranks` forks.
    """
    rank = getattr(rank_zero_only, "rank", 0)
    _restore_environment()  # fixtures of many tests come before this one
    yield
    disconnect_groups()
    if dist.is_initialized():
        dist.destroy_process_group()
    rank_zero_only.rank = rank
    _restore_environment()


def _restore_environment() -> None:
    of_pytest = {name: value for name, value in os.environ.items() if name.startswith("PYTEST_")}
    os.environ.clear()
    os.environ.update(_environment | of_pytest)


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data: ``FLOWTRAIN_DATA``, or ``shared/data`` beside the checkout."""
    folder = real_data_folder()
    if folder is None:
        pytest.skip("there is no real data here; set FLOWTRAIN_DATA to a folder that holds mini_vl")
    return folder


def real_data_folder() -> Path | None:
    """The same for what is no test; None where there is none."""
    folder = Path(os.environ.get("FLOWTRAIN_DATA", Path(__file__).parents[1] / "../shared/data"))
    return folder if folder.is_dir() else None
