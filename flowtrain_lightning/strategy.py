"""The strategy that Lightning sees: it splits a FlowModule into encoder ranks and backbone ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.optim import Optimizer

from flowtrain_lightning.allocator import Allocation, Placement, RoleLayout
from flowtrain_lightning.checkpoint.optimizer_state import NamedOptimizer
from flowtrain_lightning.compute.whole_module import refuse_all_frozen
from flowtrain_lightning.data import StepBatch
from flowtrain_lightning.packing.setting_values import check_setting
from flowtrain_lightning.packing_check import Coupling, refuse_unknown_couplings
from flowtrain_lightning.parallel.deepspeed.deepspeed_partition import showing_shapes
from flowtrain_lightning.parallel.halves import without_absent_halves
from flowtrain_lightning.parallel.ranks.groups import collective_backend
from flowtrain_lightning.parallel.ranks.job_store import root_store
from flowtrain_lightning.parallel.weight_marks import keeping_marks
from flowtrain_lightning.placement.choose_allocation import (
    LaunchContext,
    PlacementDecision,
    choose_allocation,
    remember_allocation,
)
from flowtrain_lightning.placement.measuring_process import measure_if_asked
from flowtrain_lightning.placement.request import batches_kept, make_request
from flowtrain_lightning.runtime.health import LAUNCHER, process_health
from flowtrain_lightning.runtime.job import Job, collective_timeout
from flowtrain_lightning.runtime.library_settings import ask_for_hardware_queues, give_back_freed_memory
from flowtrain_lightning.runtime.pool_capacity import PoolSettings
from flowtrain_lightning.runtime.process_end import die_with_parent, remove_faults
from flowtrain_lightning.runtime.program import StepProgram
from flowtrain_lightning.runtime.runner import RoleRunner
from flowtrain_lightning.trainer.epoch_left import EpochLeft, begin_next_epoch
from flowtrain_lightning.trainer.half_engines import HalfEngines, move_halves
from flowtrain_lightning.trainer.kinds_of_weights import stepping_by_kind
from flowtrain_lightning.trainer.launcher import RankLauncher
from flowtrain_lightning.trainer.layout_invariance import not_layout_invariant
from flowtrain_lightning.trainer.optimizer_refusals import refuse_optimizers
from flowtrain_lightning.trainer.preemption import PreemptionCheckpoint
from flowtrain_lightning.trainer.refusals import (
    refuse_foreign_module,
    refuse_other_systems,
    refuse_unlike_nodes,
    refuse_unmet_nodes,
    refuse_unsupported,
)
from flowtrain_lightning.trainer.role_checkpoints import RoleCheckpoints

_MOST_SECONDS = 365 * 86400.0


class FlowTrainStrategy(RoleCheckpoints):
    """Encoder ranks and backbone ranks, bridged by one pool. ``Trainer(strategy="flowtrain")``.

    Where nothing is said about who does what, the halves are measured in a process of their own before roles are
    assigned (a later start finds what was measured), and the allocation is taken that is predicted to be fastest. The
    log says why; ``allocation.yaml`` beside it can be edited and passed back.

    Args:
        encoder_ranks: how many ranks only encode, or of several encoders role -> how many encode for it alone:
            ``{"encoder_image": 3, "encoder_audio": 1}``; nothing is measured then.
        placement: ``"separate"`` (each rank has one role; a quarter of them encodes, where ``encoder_ranks`` is left
            open), ``"colocated"`` (each rank has both) or ``"mixed"`` (as separate, but backbone ranks encode what the
            others cannot); nothing is measured then.
        allocation: all of it, or a YAML file that holds it, as ``flowtrain plan`` and earlier runs write.
        profile: ``"auto"`` measures what the halves cost; ``"off"`` does not, and a quarter of the ranks encodes; a
            file that `flowtrain profile` wrote takes the place of measuring. A run that goes on from a checkpoint keeps
            the allocation on which it was saved, unless a file is given here.
        roles: role -> its layout, where ``encoder_ranks`` or ``placement`` says who does what:
            ``{"backbone": RoleLayout(shard="fsdp")}`` shards the backbone's weights over its ranks, and
            ``RoleLayout(tensor=2)`` lets pairs of them share every layer. Others hold whole copies. A plain dictionary
            does as well: ``{"backbone": {"shard": "fsdp"}}``.
        ranks_per_device: processes that share one device.
        encoder_activations: encoder batches per rank whose activations a trainable encoder keeps for its backward.
            Beyond that it waits, or where waiting would block computes a forward again; with 0, each runs twice. More
            memory, less waiting. None is as many as the allocation says, or 4.
        pool: bytes, tier and network of the pool.
        couples: what may couple samples of a batch, which the packing check else refuses: ``"random"`` numbers that a
            batch draws, ``"batch_norm"``, ``"encode"``, ``"backbone"``, ``"loss"``. Gradients then depend on the
            layout.
        background_saving: checkpoints are copied to host memory and written while training goes on. A checkpoint takes
            its name when it is whole, which is before the next one is saved, or ``fit`` ends.
        hang_timeout: seconds without any progress of any rank after which all ranks end with an error, and for which a
            process may be stopped while ranks start. A single rank ends, too, unless it stands in a debugger.
        timeout: seconds without any progress of any rank before all have begun their first step, after which all ranks
            end with an error: preparing data and building the model may take longer than a step.

    Raises:
        ValueError: a number that is too low, an unknown tier or network of the pool, settings that contradict each
            other, or a file that is no plan or no profile.
    """

    strategy_name = "flowtrain"

    def __init__(
        self,
        encoder_ranks: int | Mapping[str, int] | None = None,
        placement: Placement | None = None,
        allocation: Allocation | str | Path | None = None,
        profile: str | Path = "auto",
        roles: Mapping[str, RoleLayout | Mapping[str, Any]] | None = None,
        ranks_per_device: int = 1,
        encoder_activations: int | None = None,
        pool: PoolSettings | None = None,
        couples: Collection[Coupling] = (),
        background_saving: bool = False,
        hang_timeout: float = 600.0,
        timeout: float = 1800.0,
    ) -> None:
        refuse_other_systems()
        super().__init__()
        owner = type(self).__name__
        if isinstance(encoder_ranks, Mapping) and encoder_ranks:
            for role, count in encoder_ranks.items():
                check_setting(owner, f"encoder_ranks[{role!r}]", count, int, least=1)
        else:
            check_setting(owner, "encoder_ranks", encoder_ranks, int | None, least=1)
        check_setting(owner, "ranks_per_device", ranks_per_device, int, least=1)
        check_setting(owner, "encoder_activations", encoder_activations, int | None, least=0)
        check_setting(owner, "pool", pool, PoolSettings | None)
        check_setting(owner, "background_saving", background_saving, bool)
        for name, seconds in (("hang_timeout", hang_timeout), ("timeout", timeout)):
            check_setting(owner, name, seconds, float, above=0)
            if seconds > _MOST_SECONDS:
                raise ValueError(f"{owner} got {name}={seconds}; give at most {_MOST_SECONDS:.0f} seconds, a year.")
        self.ranks_per_device = ranks_per_device
        self.encoder_activations = encoder_activations
        refuse_unknown_couplings(couples)
        self.couples = tuple(couples)
        self.pool = pool or PoolSettings()
        self.background_saving = background_saving
        self.hang_timeout = hang_timeout
        self.timeout = timedelta(seconds=timeout)
        self._request = make_request(allocation, placement, encoder_ranks, profile, roles)
        self._health = process_health()
        self._decision: PlacementDecision | None = None
        self._engines = HalfEngines()
        self._epoch_left = EpochLeft()

    # ---- who does what ------------------------------------------------------------------------------------------

    @property
    def placement_decision(self) -> PlacementDecision:
        """The allocation that the run takes, and why; on rank 0 also the costs it was planned by."""
        assert self._decision is not None, "the allocation is chosen in setup_environment"
        return self._decision

    def prepare_step(self, batch: StepBatch) -> StepProgram | None:
        """This rank's work in a step, worked out by the loader's thread."""
        return None if self._runner is None else self._runner.prepare(batch)

    # ---- processes, devices and nodes ---------------------------------------------------------------------------

    @property
    def num_processes(self) -> int:
        """Processes on this node."""
        return len(self.parallel_devices or ()) * self.ranks_per_device

    @property
    def root_device(self) -> torch.device:
        """The device of this rank."""
        assert self.parallel_devices is not None
        return self.parallel_devices[self.local_rank // self.ranks_per_device]

    @property
    def fault_folder(self) -> Path:
        """The folder of ``fault-rank<rank>.txt``."""
        return _fault_folder(self.flow_module.trainer)

    def set_world_ranks(self) -> None:
        """Called by Lightning when the cluster environment is known."""
        assert self.cluster_environment is not None
        self.cluster_environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
        self.cluster_environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def _configure_launcher(self) -> None:
        assert self.cluster_environment is not None
        self._launcher = self._rank_launcher = RankLauncher(
            self.cluster_environment, self._health, self.num_processes, self.num_nodes, self._before_start
        )
        if not self.cluster_environment.creates_processes_externally:
            return
        if "TORCHELASTIC_RUN_ID" in os.environ:
            die_with_parent()  # torchrun's agent
        else:
            self._health.watch_launcher(self.global_rank, first=self.global_rank - self.local_rank)

    def _before_start(self, trainer: L.Trainer) -> None:
        """Raises where the other ranks could not run, and else removes what a former start has said of faults."""
        refuse_foreign_module(trainer.lightning_module)
        refuse_unsupported(trainer)
        refuse_unmet_nodes(trainer)
        ranks, graph = self.num_nodes * self.num_processes, self.flow_module.role_graph
        self._request.answer(ranks, self.num_nodes, self.ranks_per_device, graph)
        if self.num_nodes == 1:
            remove_faults(_fault_folder(trainer))  # here, since a rank may fail before it could remove its own

    # ---- start and end ------------------------------------------------------------------------------------------

    def connect(self, model: L.LightningModule) -> None:
        """Refuses modules without halves."""
        refuse_foreign_module(model)
        super().connect(model)

    def setup_environment(self) -> None:
        """Chooses roles, connects the groups and starts to watch over the other ranks."""
        ask_for_hardware_queues(self.root_device)
        super().setup_environment()
        module = self.flow_module
        refuse_unsupported(module.trainer)  # once more, with the callbacks that the module brings
        measure_if_asked(module.trainer, module)
        assert self.cluster_environment is not None
        if not isinstance(self.cluster_environment, LightningEnvironment):  # which reads them, or makes a port up
            os.environ["MASTER_ADDR"] = self.cluster_environment.main_address
            os.environ["MASTER_PORT"] = str(self.cluster_environment.main_port)
        reset_seed()
        self.set_world_ranks()
        tell_each_other = self.num_nodes > 1 or (self.world_size > 1 and LAUNCHER not in os.environ)
        store = self._root_store() if tell_each_other else None
        with self._health.starting(self.fault_folder, self.global_rank, self.world_size, self.hang_timeout, store):
            self._decision = self._choose_allocation()
            remember_allocation(module, self._decision.allocation)
            self._job = Job(
                self.global_rank,
                self._decision.allocation,
                self._health,
                backend=collective_backend(
                    self.root_device.type, self.global_rank, self._decision.allocation, self.ranks_per_device
                ),
                hang_timeout=self.hang_timeout,
                timeout=self.timeout,
                fault_folder=self.fault_folder,
                nodes=self.num_nodes,
            )
        layouts = self._job.allocation.layouts
        if self.root_device.type == "cpu" and any(layouts[role].gathers_weights for role in self._job.roles):
            give_back_freed_memory()
        in_parts = tuple(role for role in self._job.roles if layouts[role].divides_weights)
        module.set_local_roles(self._job.roles, in_parts, self._job.stages)
        rank_zero_info(f"flowtrain: {self._decision.text}")

    def _choose_allocation(self) -> PlacementDecision:
        given = self._request.answer(
            self.world_size, self.num_nodes, self.ranks_per_device, self.flow_module.role_graph
        )
        if given is not None:
            by_rule = "that is the rule where a role generates, and nothing else was asked for"
            asked = by_rule if self._request.is_open else "it was asked for"
            return PlacementDecision(given, "there is one rank" if self.world_size == 1 else asked)
        assert self._rank_launcher is not None
        context = LaunchContext(
            self.flow_module.trainer,
            self.flow_module,
            self._request,
            self.global_rank,
            self.world_size,
            self.num_nodes,
            self.ranks_per_device,
            batches_kept(self.encoder_activations, None),
            self._rank_launcher,
        )
        return choose_allocation(context, self._root_store(), self.timeout)

    def _root_store(self) -> Store:
        return root_store(self.global_rank, self.world_size, collective_timeout(self.hang_timeout, self.timeout))

    def setup(self, trainer: L.Trainer) -> None:
        """Puts this rank's halves onto its device, and sets up optimizers and runner."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        if self.num_nodes > 1:
            refuse_unlike_nodes(trainer, self.job.groups.cross)
        module = self.flow_module
        fits = trainer.state.fn == TrainerFn.FITTING
        assert self._rank_launcher is not None
        if self._rank_launcher.last_checkpoint is not None:
            self._rank_launcher.last_checkpoint.settle(trainer, self.job.groups.cross)
        if fits:
            refuse_all_frozen(module)
            if not self._rank_launcher.resumes:
                self._epoch_left.take_up(trainer)
            module.drop_absent_roles()
        with keeping_marks(module):
            self.model = self.precision_plugin.convert_module(module)
        self.model_to_device()
        engines = self._engines.make(module, trainer, self.job, self.root_device)
        kept = batches_kept(self.encoder_activations, self.job.allocation)
        self._runner = RoleRunner(module, trainer, self.job, engines, kept, self.pool)
        module.attach_runner(self._runner)
        for sentence in not_layout_invariant(module):
            rank_zero_info(f"flowtrain: {sentence}")
        if fits:
            self.setup_optimizers(trainer)
            self._engines.take_optimizers(engines, self.optimizers, self._named_optimizers)
            self._record_allocation(trainer)
        others = [each for each in trainer.callbacks if not isinstance(each, PreemptionCheckpoint)]  # type: ignore[attr-defined]
        trainer.callbacks = [*others, PreemptionCheckpoint(self._runner, self.job)]  # type: ignore[attr-defined]
        self.setup_precision_plugin()

    def _record_allocation(self, trainer: L.Trainer) -> None:
        folder = str(trainer.log_dir or trainer.default_root_dir)  # every rank asks for it
        leaves_files = trainer.loggers or trainer.checkpoint_callbacks  # type: ignore[attr-defined]
        if self.is_global_zero and leaves_files and not trainer.fast_dev_run:  # type: ignore[attr-defined]
            self.placement_decision.record(trainer, folder)

    def model_to_device(self) -> None:
        """Moves the halves that live on this rank; the others have no memory to move."""
        move_halves(self.flow_module, self.job, self.root_device)

    def setup_optimizers(self, trainer: L.Trainer) -> None:
        """The user's optimizers, less the parameters of absent halves."""
        with showing_shapes(self.flow_module):  # groups often follow from them
            super().setup_optimizers(trainer)
        refuse_optimizers(self.optimizers)
        self._named_optimizers = [NamedOptimizer(optimizer, self.flow_module) for optimizer in self.optimizers]

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """One step of an optimizer, whatever kinds of weights this rank holds."""
        with stepping_by_kind(optimizer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    def on_train_start(self) -> None:
        """Lets a run that goes on after a whole epoch begin the next one at its first batch."""
        begin_next_epoch(self.flow_module.trainer)

    def on_train_end(self) -> None:
        """Waits for the checkpoint that is being written, and notes where in its epoch the run ends."""
        self._epoch_left.remember(self.flow_module.trainer)
        with self.job.during("save a checkpoint"):
            self._finish_saving()

    def on_predict_end(self) -> None:
        """Waits for all ranks: an encoder rank holds features until the backbone has predicted from them."""
        self.barrier()

    def on_exception(self, exception: BaseException) -> None:
        """Tells the other ranks why this one fails, unless it only does so because one of them failed."""
        if self._job is not None and not isinstance(exception, SIGTERMException):  # with this one all end in good order
            self._job.tell(exception)

    def teardown(self) -> None:
        """Closes pool and mesh; the process groups stay for what the user does after ``fit``."""
        if self._saving is not None:  # the run has failed
            self._saving.give_up()
            self._saving = None
        if self._runner is not None:
            self._runner.close()
        if self._job is not None:
            self._job.leave()
        self._health.rest()
        if self._lightning_module is not None and self._job is not None:
            self.flow_module.attach_runner(None)
            self.flow_module.set_local_roles(None)  # until another run says otherwise, as plain Lightning does not
            with without_absent_halves(self.flow_module, self._job.roles):
                self._weights_to_host()
        self._engines.release()
        for optimizer in self._named_optimizers:
            optimizer.to_host()
        self.precision_plugin.teardown()
        if self.cluster_environment is not None:
            self.cluster_environment.teardown()
        if self.accelerator is not None:
            self.accelerator.teardown()

    def _weights_to_host(self) -> None:
        if any(weight.is_meta for weight in self.flow_module.parameters()):
            return  # a module that lies on no half was refused: its weights may have no memory to move
        try:
            with keeping_marks(self.flow_module):
                self.flow_module.cpu()
        except RuntimeError:
            # PyTorch moves no shard that a graph holds, as that of a step in which the user's code has failed. What is
            # raised here would be told in place of that failure.
            if self.flow_module.trainer.state.status != TrainerStatus.INTERRUPTED:
                raise


def _fault_folder(trainer: L.Trainer) -> Path:
    root = str(trainer.default_root_dir)
    return Path() if "://" in root else Path(root)
