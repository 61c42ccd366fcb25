"""Starts the other ranks of this node, as Lightning's own launcher does."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.strategies.launchers.subprocess_script import (
    _HYDRA_AVAILABLE,
    _basic_subprocess_cmd,
    _hydra_subprocess_cmd,
)
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies.launchers import _SubprocessScriptLauncher
from lightning.pytorch.trainer.states import TrainerFn

from flowtrain_lightning.parallel.ranks.job_secret import offer_secret
from flowtrain_lightning.runtime.health import LAUNCHER, HealthMonitor
from flowtrain_lightning.runtime.process_end import tied_to_this_process
from flowtrain_lightning.runtime.watched_process import WatchedProcess
from flowtrain_lightning.trainer.last_checkpoint import LAST, LastCheckpoint


class RankLauncher(_SubprocessScriptLauncher):
    """Runs the script once more for every other rank, as Lightning's own launcher does.

    Lightning's kills all processes, without a word on why, up to 5 s after a child has failed. Here the health monitor
    looks after them, which knows more.

    Args:
        environment: tells the ranks about each other.
        health: of this process.
        processes: ranks of this node.
        nodes: of the job.
        check: called with the Trainer before any other rank starts; raises where that would be in vain.

    Attributes:
        weights_only: what ``fit`` or its like was told about reading its checkpoint.
        last_checkpoint: what stands for ``ckpt_path="last"``, where that was given.
    """

    def __init__(
        self,
        environment: ClusterEnvironment,
        health: HealthMonitor,
        processes: int,
        nodes: int,
        check: Callable[[Any], None],
    ) -> None:
        super().__init__(environment, processes, nodes)
        self._health = health
        self._check = check
        self._ckpt_path: Any = None
        self.weights_only: bool | None = None
        self.last_checkpoint: LastCheckpoint | None = None

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Starts the other ranks, unless that was done before or is somebody else's affair, and calls ``function``."""
        call = inspect.signature(function).bind(*args, **kwargs)
        given, self.weights_only = call.arguments.get("ckpt_path"), call.arguments.get("weights_only")
        self._ckpt_path = given
        self.last_checkpoint = None
        if given == LAST and (trainer.state.fn == TrainerFn.FITTING or self._lightnings_own(trainer) is None):
            self.last_checkpoint = LastCheckpoint(self.weights_only)  # an evaluation takes what plain Lightning would
        if self.last_checkpoint is not None:
            call.arguments["ckpt_path"] = self.last_checkpoint
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        _set_num_threads_if_needed(num_processes=self.num_processes)
        if not self.cluster_environment.creates_processes_externally:
            if self.num_processes > 1:
                _refuse_what_cannot_run_again()
            self._check(trainer)
            if self.num_nodes == 1:
                offer_secret()
            self._call_children_scripts()
            rank = self.cluster_environment.global_rank()
            children = [WatchedProcess(process.pid, process.poll) for process in self.procs]
            self._health.watch_processes(rank, dict(enumerate(children, start=rank + 1)))
        return function(*call.args, **call.kwargs)

    def _call_children_scripts(self) -> None:
        """As Lightning's own, but a child ends with this process until it can look after itself."""
        self._check_can_spawn_children()
        environment = self.cluster_environment
        os.environ |= {
            "MASTER_ADDR": environment.main_address,
            "MASTER_PORT": str(environment.main_port),
            "NODE_RANK": str(environment.node_rank()),
            "LOCAL_RANK": str(environment.local_rank()),
            "WORLD_SIZE": str(self.num_processes * self.num_nodes),
            LAUNCHER: str(os.getpid()),
        }
        self.procs = [self._start(local_rank) for local_rank in range(1, self.num_processes)]

    def _start(self, local_rank: int) -> subprocess.Popen[bytes]:
        command, folder = _basic_subprocess_cmd(), None
        if _HYDRA_AVAILABLE:
            from hydra.core.hydra_config import HydraConfig  # type: ignore[import-not-found]

            if HydraConfig.initialized():
                command, folder = _hydra_subprocess_cmd(local_rank)
        variables = os.environ | {"LOCAL_RANK": str(local_rank)}
        return subprocess.Popen(tied_to_this_process(command), env=variables, cwd=folder)

    @property
    def resumes(self) -> bool:
        """Whether ``fit`` or its like goes on from a checkpoint."""
        return bool(self._ckpt_path if self.last_checkpoint is None else self.last_checkpoint)

    def checkpoint(self, trainer: Any) -> str | None:
        """The checkpoint that ``fit`` or its like was asked to load, which the Trainer itself tells only after setup.

        Raises:
            ValueError: there is no such checkpoint.
        """
        if self.last_checkpoint is not None:
            return self.last_checkpoint.expected(trainer)
        return self._lightnings_own(trainer)

    def _lightnings_own(self, trainer: Any) -> str | None:
        """Lightning's own way from "best", "last" and "hpc" to a path; there is no public one."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no last one is no news yet
            found = trainer._checkpoint_connector._parse_ckpt_path(
                trainer.state.fn, self._ckpt_path, model_provided=True, model_connected=True
            )
        return None if found is None else str(found)


def _refuse_what_cannot_run_again() -> None:
    """Raises where Python was given no script and no module that another rank could run, or none that is found."""
    main = sys.modules["__main__"]
    if main.__spec__ is not None or Path(sys.argv[0]).is_file():
        return
    script = Path(getattr(main, "__file__", None) or "")
    if script.is_file() and script.name == Path(sys.argv[0]).name:
        raise MisconfigurationException(
            f"Every rank runs your script once more, but {sys.argv[0]} is not found from {Path.cwd()}, to which the "
            f"script has gone. Start it by its whole path, {script.absolute()}, or change the directory after the run."
        )
    raise MisconfigurationException(
        "Every rank runs your script once more, but Python got it from its command line (`python -c`) or from "
        "standard input. Save it as a file and run that, or set Trainer(devices=1)."
    )
