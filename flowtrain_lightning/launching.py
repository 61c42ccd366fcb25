"""Where ranks run and how they find each other: processes, devices and nodes, before anyone has a role."""

from __future__ import annotations

import os
from abc import abstractmethod
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.distributed import Store  # type: ignore[attr-defined]

from flowtrain_lightning.across_roles import AcrossRoles
from flowtrain_lightning.parallel.job_store import root_store
from flowtrain_lightning.runtime.job import patience
from flowtrain_lightning.runtime.start_watch import StartWatch
from flowtrain_lightning.runtime.watchdog import die_with_parent
from flowtrain_lightning.trainer.launcher import RankLauncher, kin


class LaunchingRanks(AcrossRoles):
    """A strategy that starts ranks on every node, or is started by torchrun or SLURM as one of them.

    Args:
        ranks_per_device: processes that share one device.
        hang_timeout: seconds without any progress of any rank after which all ranks end with an error.
        timeout: the same until every rank has begun its first step.

    Attributes:
        rank_launcher: starts the other ranks of this node where nobody else does; None until Lightning asks for it.
    """

    def __init__(self, ranks_per_device: int, hang_timeout: float, timeout: timedelta) -> None:
        super().__init__()
        if ranks_per_device < 1:
            raise ValueError(f"ranks_per_device is {ranks_per_device}; at least 1 process must use each device.")
        self.num_nodes = 1
        self.ranks_per_device = ranks_per_device
        self.hang_timeout = hang_timeout
        self.timeout = timeout
        self.rank_launcher: RankLauncher | None = None

    @property
    def is_distributed(self) -> bool:
        """Lightning asks for this name to switch ``sync_dist`` and its like on."""
        return True

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices or ()) * self.ranks_per_device

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank // self.ranks_per_device]

    def set_world_ranks(self) -> None:
        """Called by Lightning when the cluster environment is known."""
        assert self.cluster_environment is not None
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = self.rank_launcher = RankLauncher(
            self.cluster_environment, self.num_processes, self.num_nodes, self.check_before_start
        )
        if not self.cluster_environment.creates_processes_externally:
            return
        if "TORCHELASTIC_RUN_ID" in os.environ:
            die_with_parent()  # torchrun's agent
        else:
            kin.rank = self.global_rank
            kin.know_launcher(first=self.global_rank - self.local_rank)

    @abstractmethod
    def check_before_start(self, trainer: L.Trainer) -> None:
        """Raises where it would be in vain to start the other ranks."""

    def name_main_address(self) -> None:
        """Tells torch.distributed where rank 0 is; SLURM, for one, has a way of its own to say so."""
        assert self.cluster_environment is not None
        if not isinstance(self.cluster_environment, LightningEnvironment):  # which reads them, or makes a port up
            os.environ["MASTER_ADDR"] = self.cluster_environment.main_address
            os.environ["MASTER_PORT"] = str(self.cluster_environment.main_port)

    def watched_start(self) -> AbstractContextManager[Any]:
        """Inside, the end of a rank of another node is noticed; on one node `kin` sees them all."""
        if self.num_nodes == 1:
            return nullcontext()
        kin.folder, kin.needed = self.fault_folder, True
        return StartWatch(self.root_store(), self.global_rank, self.world_size, self.fault_folder)

    def root_store(self) -> Store:
        """Through which ranks tell each other what they must know before they have groups."""
        return root_store(self.global_rank, self.world_size, patience(self.hang_timeout, self.timeout))

    @property
    def fault_folder(self) -> Path:
        """Where ``fault-rank<rank>.txt`` is written."""
        assert self.lightning_module is not None
        root = str(self.lightning_module.trainer.default_root_dir)
        return Path() if "://" in root else Path(root)

    @property
    def backend(self) -> str:
        """Of the roles' process groups."""
        # NCCL refuses two ranks of one group on the same device.
        return "nccl" if self.root_device.type == "cuda" and self.ranks_per_device == 1 else "gloo"
