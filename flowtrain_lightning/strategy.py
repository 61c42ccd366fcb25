"""What Lightning sees: the strategy that splits a FlowModule into encoder ranks and backbone ranks."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import lightning as L
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException

from flowtrain_lightning.allocator import Allocation, Placement
from flowtrain_lightning.allocator.roles import BACKBONE, ROLES
from flowtrain_lightning.checkpoint.optimizer_state import NamedOptimizer
from flowtrain_lightning.data import RankShard
from flowtrain_lightning.launching import LaunchingRanks
from flowtrain_lightning.parallel import broadcast_half
from flowtrain_lightning.parallel.halves import half_tensors, without_absent_halves
from flowtrain_lightning.placement import (
    LaunchContext,
    PlacementDecision,
    answer_if_wanted,
    choose_allocation,
    make_request,
    part_of,
    remember,
)
from flowtrain_lightning.pool import NetworkChoice, TierChoice
from flowtrain_lightning.runtime.engine import RoleRunner, RunnerSettings
from flowtrain_lightning.runtime.job import Job
from flowtrain_lightning.saving import SavingHalves
from flowtrain_lightning.trainer.launcher import kin
from flowtrain_lightning.trainer.layout_invariance import not_layout_invariant
from flowtrain_lightning.trainer.nodes import refuse_unlike_nodes, refuse_unmet_nodes
from flowtrain_lightning.trainer.preemption import PreemptionCheckpoint
from flowtrain_lightning.trainer.refusals import (
    refuse_foreign_module,
    refuse_optimizers,
    refuse_other_systems,
    refuse_unsupported,
)


class FlowTrainStrategy(LaunchingRanks, SavingHalves):
    """Encoder ranks and backbone ranks, bridged by one pool. ``Trainer(strategy="flowtrain")``.

    Where nothing is said about who does what, the halves are measured in a process of their own before roles are
    assigned (a later start finds what was measured), and the allocation is taken that is predicted to be fastest. The
    log says why; ``allocation.yaml`` beside it can be edited and passed back.

    Args:
        encoder_ranks: how many ranks encode; nothing is measured then.
        placement: ``"separate"`` (each rank has one role; a quarter of them encodes, where ``encoder_ranks`` is left
            open) or ``"colocated"`` (each rank has both); nothing is measured then.
        allocation: all of it, or a YAML file that holds it, as ``flowtrain plan`` and earlier runs write.
        profile: ``"auto"`` measures what the halves cost; ``"off"`` does not, and a quarter of the ranks encodes; a
            file that `flowtrain profile` wrote takes the place of measuring. A run that goes on from a checkpoint keeps
            the allocation on which it was saved, unless a file is given here.
        ranks_per_device: processes that share one device.
        encoder_activations: encoder batches per rank whose activations a trainable encoder keeps for its backward.
            Beyond that it waits, or where waiting would block computes a forward again. More room, less waiting.
        recompute_encoder: keep no activations: every encoder forward runs a second time for its backward.
        pool_bytes: room in the pool on each rank. By default it follows from the plan and grows between steps.
        pool_tier: where features and gradients of GPUs lie: ``"auto"`` in GPU memory between ranks that prove at start
            that they can read it there, ``"host"`` in host memory, ``"device"`` as ``"auto"`` or not at all.
        pool_network: how they pass between hosts: ``"auto"`` over TCP, ``"nixl"`` as that package finds (extra `nixl`).
        hang_timeout: seconds without any progress of any rank after which all ranks end with an error.
        timeout: the same until every rank has begun its first step, since preparing data and building the model may
            take longer.
    """

    strategy_name = "flowtrain"

    def __init__(
        self,
        encoder_ranks: int | None = None,
        placement: Placement | None = None,
        allocation: Allocation | str | Path | None = None,
        profile: str | Path = "auto",
        ranks_per_device: int = 1,
        encoder_activations: int = 4,
        recompute_encoder: bool = False,
        pool_bytes: int | None = None,
        pool_tier: TierChoice = "auto",
        pool_network: NetworkChoice = "auto",
        hang_timeout: float = 600.0,
        timeout: float = 1800.0,
    ) -> None:
        refuse_other_systems()
        super().__init__(ranks_per_device, hang_timeout, timedelta(seconds=timeout))
        if encoder_activations < 0:
            raise ValueError(f"encoder_activations is {encoder_activations}; it counts batches, from 0.")
        if pool_tier not in get_args(TierChoice):
            raise ValueError(f"pool_tier is {pool_tier!r}; it is 'auto', 'host' or 'device'.")
        if pool_network not in get_args(NetworkChoice):
            raise ValueError(f"pool_network is {pool_network!r}; it is 'auto' or 'nixl'.")
        self._request = make_request(allocation, placement, encoder_ranks, profile)
        kept = 0 if recompute_encoder else encoder_activations
        self._settings = RunnerSettings(kept, pool_bytes, pool_tier, pool_network)
        self._placement_decision: PlacementDecision | None = None
        self._engine: RoleRunner | None = None

    # ---- who does what ------------------------------------------------------------------------------------------

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """For loaders that Lightning shards itself: by backbone rank; an encoder rank repeats the first part."""
        backbones = self.allocation.ranks[BACKBONE]
        rank = self.global_rank
        return {"num_replicas": len(backbones), "rank": backbones.index(rank) if rank in backbones else 0}

    @property
    def rank_shard(self) -> RankShard:
        """Which part of every step this rank's loaders load."""
        return part_of(self.allocation, self.global_rank)

    @property
    def placement_decision(self) -> PlacementDecision:
        """Which allocation the run takes, and why; on rank 0 also what it was planned by."""
        assert self._placement_decision is not None, "the allocation is settled in setup_environment"
        return self._placement_decision

    @property
    def engine(self) -> RoleRunner:
        """Runs the steps; its timeline tells what the lanes did when."""
        assert self._engine is not None, "the engine exists from setup to teardown"
        return self._engine

    # ---- start and end ------------------------------------------------------------------------------------------

    def connect(self, model: L.LightningModule) -> None:
        """Refuses modules without halves."""
        refuse_foreign_module(model)
        super().connect(model)

    def check_before_start(self, trainer: L.Trainer) -> None:
        """Refuses what can be known to be in vain before there are other ranks."""
        refuse_foreign_module(trainer.lightning_module)
        refuse_unsupported(trainer)
        refuse_unmet_nodes(trainer)
        self._request.answer(self.num_nodes * self.num_processes, self.num_nodes)

    def setup_environment(self) -> None:
        """Settles roles, connects the groups and starts to watch over the other ranks."""
        super().setup_environment()
        refuse_unsupported(self.flow_module.trainer)  # once more, with the callbacks that the module brings
        answer_if_wanted(self.flow_module.trainer, self.flow_module)
        self.name_main_address()
        reset_seed()
        self.set_world_ranks()
        with self.watched_start():
            self._placement_decision = self._choose_allocation()
            remember(self.flow_module, self.placement_decision.allocation)
            self._job = Job(
                self.global_rank,
                self.placement_decision.allocation,
                backend=self.backend,
                hang_timeout=self.hang_timeout,
                timeout=self.timeout,
                fault_folder=self.fault_folder,
                nodes=self.num_nodes,
            )
        self.flow_module.set_local_roles(self.job.roles)
        rank_zero_info(f"flowtrain: {self.placement_decision.text}")

    def _choose_allocation(self) -> PlacementDecision:
        given = self._request.answer(self.world_size, self.num_nodes)
        if given is not None:
            return PlacementDecision(given, "there is one rank" if self.world_size == 1 else "it was asked for")
        assert self.rank_launcher is not None
        kin.folder, kin.needed = self.fault_folder, True
        starting = LaunchContext(
            self.flow_module.trainer,
            self.flow_module,
            self._request,
            self.global_rank,
            self.world_size,
            self.num_nodes,
            self.ranks_per_device,
            self._settings.encoder_activations,
            self.rank_launcher,
        )
        return choose_allocation(starting, self.root_store(), self.timeout)

    def setup(self, trainer: L.Trainer) -> None:
        """Places this rank's halves, and sets up optimizers and engine."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        if self.num_nodes > 1:
            refuse_unlike_nodes(trainer, self.job.groups.cross)
        module = self.flow_module
        if trainer.state.fn == TrainerFn.FITTING:
            module.drop_absent_roles()
        self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        for role in self.job.roles:
            broadcast_half(half_tensors(module, role))
        self._engine = RoleRunner(module, trainer, self.job, self._settings)
        module.attach_runner(self._engine)
        for sentence in not_layout_invariant(module):
            rank_zero_info(f"flowtrain: {sentence}")
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            self._record_allocation(trainer)
        if not any(isinstance(callback, PreemptionCheckpoint) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            trainer.callbacks.append(PreemptionCheckpoint())  # type: ignore[attr-defined]
        self.setup_precision_plugin()

    def _record_allocation(self, trainer: L.Trainer) -> None:
        folder = str(trainer.log_dir or trainer.default_root_dir)  # every rank asks for it
        leaves_files = trainer.loggers or trainer.checkpoint_callbacks  # type: ignore[attr-defined]
        if trainer.is_global_zero and leaves_files and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self.placement_decision.record(trainer, folder)

    def model_to_device(self) -> None:
        """Moves the halves that live on this rank; the others have no memory to move."""
        with without_absent_halves(self.flow_module, self.job.roles):
            self.flow_module.to(self.root_device)

    def setup_optimizers(self, trainer: L.Trainer) -> None:
        """The user's optimizers, less the parameters of absent halves."""
        super().setup_optimizers(trainer)
        refuse_optimizers(self.optimizers)
        self._named_optimizers = [NamedOptimizer(optimizer, self.flow_module) for optimizer in self.optimizers]

    def on_predict_end(self) -> None:
        """Waits for all ranks: an encoder rank holds features until the backbone has predicted from them."""
        self.barrier()

    def on_exception(self, exception: BaseException) -> None:
        """Tells the other ranks why this one fails, unless it only does so because one of them failed."""
        if self._job is not None and not isinstance(exception, SIGTERMException):  # with this one all end in good order
            self._job.tell(exception)

    def teardown(self) -> None:
        """Closes pool and mesh; the process groups stay for what the user does after ``fit``."""
        if self._engine is not None:
            self._engine.close()
        if self._job is not None:
            self._job.leave()
        kin.needed = False
        if self._lightning_module is not None and self._job is not None:
            self.flow_module.attach_runner(None)
            self.flow_module.set_local_roles(ROLES)  # until another run says otherwise, as plain Lightning does not
            with without_absent_halves(self.flow_module, self.job.roles):
                # A module that lies on no half was refused: its weights may have no memory to move.
                if not any(parameter.is_meta for parameter in self.flow_module.parameters()):
                    self.flow_module.cpu()
        self.precision_plugin.teardown()
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()
