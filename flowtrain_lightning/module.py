"""`FlowModule`: the LightningModule that users write, whose halves have names."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

import lightning as L
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flowtrain_lightning.checkpoint import plain_file
from flowtrain_lightning.compute.encoder_fingerprint import EncoderFingerprints
from flowtrain_lightning.compute.generation import generate_greedily
from flowtrain_lightning.compute.named_losses import LossOutput, with_rows
from flowtrain_lightning.compute.own_backward import OwnBackward
from flowtrain_lightning.compute.step_logging import StepLogging
from flowtrain_lightning.compute.whole_module import WholeModuleRunner
from flowtrain_lightning.data import Features, PackedBatch, PackedMedia, PackedTargets, SampleSizes, StepBatch
from flowtrain_lightning.data.loading.ranks_of_trainer import refuse_loader_of_others
from flowtrain_lightning.packing_check import Coupling
from flowtrain_lightning.packing_check.first_fit import check_before_fit
from flowtrain_lightning.packing_check.needed_weights import NeededWeight
from flowtrain_lightning.parallel import TensorPlan
from flowtrain_lightning.parallel.context_parallel import draw_for_own_tokens, shared_tokens, with_summed_gradients
from flowtrain_lightning.parallel.fully_shard import shard_repeated_blocks
from flowtrain_lightning.parallel.held_halves import HeldHalves

# What a FlowModule logs is agreed on by all ranks before Lightning sees it, so this advice would mislead.
warnings.filterwarnings("ignore", message=r"It is recommended to use `self\.log\(.*sync_dist=True\)`")
# Of Lightning, and of torch where it copies such objects: nobody who trains can change that.
warnings.filterwarnings("ignore", message=r"`isinstance\(treespec, LeafSpec\)` is deprecated")


class StepRunner(Protocol):
    """Runs the steps: ``WholeModuleRunner`` under plain Lightning, ``RoleRunner`` under flowtrain."""

    trainer: L.Trainer

    def training_step(self, batch: StepBatch, batch_idx: int) -> Tensor:
        """Forward and backward of a whole step; gradients are final, the mean loss is returned."""

    def evaluation_step(self, batch: StepBatch, batch_idx: int, stage: str) -> Tensor:
        """Forward of a whole step; the mean loss is returned."""

    def predict_step(self, batch: StepBatch, batch_idx: int) -> list[Any]:
        """Predictions of this rank's microbatches."""

    def gradient_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """The 2-norm of the gradients of all halves; ``parameters`` are this rank's."""

    def agree_on_logged(self, name: str, value: Any) -> Any:
        """Returns the value that ``log`` records outside of microbatches; raises where ranks log different names."""


class FlowModule(HeldHalves, OwnBackward, StepLogging):
    """A vision-language model in two halves: an encoder of media and a backbone of tokens.

    Where media of several modalities have an encoder each, ``halves`` names them ``"encoder_image"``,
    ``"encoder_audio"`` and the like, and a method builds each: ``configure_encoder_image`` and so on. All are called
    through ``encode``, which finds the modality in ``media.modality``. Other names do as well, where ``edges`` says
    what flows between them: ``edges = {"image": ("eye", "reader"), "audio": ("ear", "reader")}``.

    A subclass says how each half is built and what it computes; which rank computes what, and when, is the
    strategy's affair. The same subclass trains under ``strategy="flowtrain"``, ``"auto"`` and ``"ddp"``.

    Attributes:
        halves: for each half the paths of its modules. Every parameter lies under exactly one half. Which one decides
            who computes it and, where nothing of the encoder half trains, how far ahead of the backbone that is: see
            the guide on projectors.
        edges: modality -> the half that encodes it and the half that reads the features and computes the loss; not
            needed with the names above. An edge that leaves that half leads to one that generates: ``"generated"`` is
            the modality of images whose part of a record says ``"generate": true``.
        loss_weights: half -> the weight of its loss, where the backbone's is not the only one; 1 where it is missing.
            Or the name of a further loss of ``loss`` -> its weight. Each is divided by its own count over all ranks.
        condition_rows: places that an image to be generated has among the tokens, see ``condition``.
        values_per_patch: numbers that ``generator_loss`` counts for each patch of an image, where they are others than
            the patch has, as those of latents are.
        max_new_tokens: how many tokens ``generate`` adds at most.
        end_token: the id, or the ids, at which ``generate`` ends a sequence, or None.
        couples: what of it may couple samples of a batch, see `flowtrain_lightning.check`; by default nothing.
        encodes_parts_apart: ``encode`` gives for some moments of a clip, or tiles of a picture, the rows that it gives
            for them within the whole, so large ones may be dealt in pieces. Rows may depend on ``before`` and
            ``behind`` of `Clip` and `Tiles`.
    """

    halves: Mapping[str, tuple[str, ...]] = {"encoder": ("encoder",), "backbone": ("backbone",)}
    edges: Mapping[str, tuple[str, str]] = {}
    loss_weights: Mapping[str, float] = {}
    condition_rows: int = 64
    values_per_patch: int | None = None
    max_new_tokens: int = 32
    end_token: int | Collection[int] | None = None
    couples: Collection[Coupling] = ()
    encodes_parts_apart: bool = False

    def __init__(self) -> None:
        super().__init__()
        self._runner: StepRunner | None = None
        self._fingerprints = EncoderFingerprints(self)
        self._checked = False
        self.conditional_modules: tuple[str, ...] = ()  # which only some samples run, as the packing check found
        self.needed_weights: tuple[NeededWeight, ...] = ()  # elsewhere than they stand, as it found

    # ---- what a user writes -------------------------------------------------------------------------------------

    def configure_encoder(self) -> None:
        """Builds the modules of the encoder half. Runs in a random stream of its own.

        Where ranks will hold parts of the half only, its weights have no memory yet while this runs, and get their
        numbers later, each rank those of its part. Create them and write them as ever, but do not read them back.
        """
        raise NotImplementedError(f"{type(self).__name__} must define configure_encoder, or configure_whole.")

    def configure_backbone(self) -> None:
        """Builds the modules of the backbone half. See `configure_encoder`."""
        raise NotImplementedError(f"{type(self).__name__} must define configure_backbone, or configure_whole.")

    def configure_generator(self) -> None:
        """Builds the modules of the generator half, if there is one. See `configure_encoder`."""
        raise NotImplementedError(f"{type(self).__name__} must define configure_generator, or configure_whole.")

    def configure_whole(self) -> None:
        """Builds all halves at once, instead of the methods above.

        For models that exist in one piece, with their halves named by path in ``halves``. Every rank then builds
        everything for a moment before it gives up what it does not need.
        """
        raise NotImplementedError

    def prepare_media(self, media: PackedMedia) -> Mapping[str, Tensor]:
        """Computes inputs of ``encode`` that follow from the sizes of media alone, such as positions; by default none.

        It runs on the host while earlier steps train, in the loader's thread. So ``encode`` finds it on the device, in
        ``media.inputs``, and reads nothing from there: whoever reads from a GPU waits for all that it has to do.

        Returns:
            name -> a CPU tensor.
        """
        return {}

    def parallelize_encoder(self, mesh: DeviceMesh, **settings: Any) -> None:
        """Says which modules of the encoder gather their weights alone, where its layout shards them.

        Override it with calls of `torch.distributed.fsdp.fully_shard`, from the inside out. What it leaves is gathered
        for every forward as a whole. It runs before weights have numbers and before ``configure_optimizers``.

        Args:
            mesh: the role's ranks; its dimensions are ``"shard"`` or ``"replica", "shard"``.
            settings: the other arguments of `fully_shard`: precision, offloading and when weights are given back.
        """
        shard_repeated_blocks(map(self.get_submodule, self.halves["encoder"]), mesh, **settings)

    def parallelize_backbone(self, mesh: DeviceMesh, **settings: Any) -> None:
        """Says which modules of the backbone gather their weights alone. See `parallelize_encoder`."""
        shard_repeated_blocks(map(self.get_submodule, self.halves["backbone"]), mesh, **settings)

    def encode(self, media: PackedMedia) -> Tensor | tuple[Tensor, ...]:
        """Encoder ranks: packed media of one modality -> features.

        Returns:
            ``[sum(media.rows), ...]``, or a tuple of such tensors, rows in the order of the media.
        """
        raise NotImplementedError(f"{type(self).__name__} must define encode.")

    def merge(self, batch: PackedBatch, features: Features) -> dict[str, Any]:
        """Backbone ranks: token embeddings and features -> the backbone's keyword arguments.

        Args:
            batch: the microbatch.
            features: modality -> features, whose rows belong at ``batch.media_positions[modality]``. A modality
                without media in this microbatch is absent; or it has no rows, where ranks share the backbone's weights
                and others have media: weights that only features meet then take part on every rank.
        """
        raise NotImplementedError(f"{type(self).__name__} must define merge, which generate calls too.")

    def loss(self, outputs: Any, batch: PackedBatch) -> LossOutput:
        """The backbone's outputs -> the loss **summed** over target tokens, and their number.

        Of several losses a dictionary of such pairs, the backbone's under the name of its half.
        """
        raise NotImplementedError(f"{type(self).__name__} must define loss.")

    def loss_counts(self, sizes: SampleSizes) -> Mapping[str, int]:
        """How many terms each further loss of ``loss`` has in a step of such sizes; by default there is none."""
        return {}

    def condition(self, outputs: Any, batch: PackedBatch) -> Tensor | tuple[Tensor, ...]:
        """Backbone ranks: the backbone's outputs -> what the generator reads of them.

        Returns:
            ``[len(batch.condition_positions), ...]``, or a tuple of such tensors: a row for each place that an image to
            be generated has among the tokens, in order; no rows where the microbatch has none.
        """
        raise NotImplementedError(f"{type(self).__name__} must define condition.")

    def generator_loss(
        self, items: PackedTargets, condition: Tensor | tuple[Tensor, ...]
    ) -> tuple[Tensor, int | Tensor]:
        """Generator ranks: images as they should become, and what is known of them -> the loss **summed**, and a count.

        Args:
            items: of any microbatches, packed. Random numbers are to come from it: `PackedTargets.normal_like`.
            condition: what ``condition`` returned for these items, in their order.
        """
        raise NotImplementedError(f"{type(self).__name__} must define generator_loss.")

    def backbone_step(self, batch: PackedBatch, features: Features, stage: str) -> Any:
        """One microbatch on a backbone rank.

        Args:
            batch: the microbatch.
            features: see ``merge``.
            stage: ``"train"``, ``"val"``, ``"test"`` or ``"predict"``.

        Returns:
            what ``loss`` returns, and behind it what ``condition`` returns where there is a generator; for
            ``"predict"`` anything, by default what ``generate`` returns.
        """
        if stage == "predict":
            return self.generate(batch, features)
        backbone = self.get_submodule(self.halves[self.role_graph.trunk][0])
        with shared_tokens(len(batch.tokens)) as own:  # None but where context ranks share sequences
            if own is None:
                outputs = backbone(**self.merge(batch, features))
                loss = self.loss(outputs, batch)
                return with_rows(loss, self.condition(outputs, batch)) if self.role_graph.behind else loss
            arguments = self.slice_tokens(self.merge(batch, with_summed_gradients(features)), own)
            draw_for_own_tokens()
            return self.loss(backbone(**arguments), batch.slice_tokens(own))

    def step_alone(self, batch: PackedBatch, features: Features) -> LossOutput | None:
        """One sample as it was computed before anything was changed for packing; only the packing check asks for it.

        By default None: `backbone_step` on one sample is that. A module whose attention is another one than its model's
        own returns what ``loss`` gives for the model itself.

        Raises:
            TypeError: the model itself takes other features than ``encode`` gives; the check refuses that by its words.
        """
        return None

    def generate(self, batch: PackedBatch, features: Features) -> list[tuple[int, list[int]]]:
        """Greedy continuation of every sequence up to ``end_token``: its data set index and new token ids."""
        return generate_greedily(self, batch, features)

    def tensor_plan(self, role: str, ranks: int) -> TensorPlan:
        """Divides the layers of a half among tensor-parallel ranks; only ``tensor`` of a layout asks for it.

        Args:
            role: whose half it is.
            ranks: how many there are; heads and widths must be multiples of it.

        Returns:
            path of a module (``*`` stands for one part of a path) -> its style, see
            `flowtrain_lightning.parallel.TensorStyle`. What is not named is whole on every rank. In the forward, a
            layer between ``"colwise"`` and ``"rowwise"`` ones sees only this rank's share of heads or of the width.
        """
        raise NotImplementedError(
            f"The {role} is to be divided among {ranks} tensor ranks, but {type(self).__name__} does not say how. "
            "Define tensor_plan, or give the role a layout without a tensor degree, such as shard 'fsdp'."
        )

    def slice_tokens(self, arguments: dict[str, Any], own: slice) -> dict[str, Any]:
        """This rank's tokens of what ``merge`` returned; only ``context`` of a layout asks for it.

        Args:
            arguments: what ``merge`` returned for the whole microbatch.
            own: the tokens on which this rank computes.

        Returns:
            the same arguments with whatever there is of each token cut to ``own``. Bounds of sequences stay those of
            the whole microbatch: attention, which must be `flowtrain_lightning.attention.varlen_attention`, sees all
            tokens.
        """
        raise NotImplementedError(f"{type(self).__name__} must define slice_tokens for context ranks.")

    def logits(self, outputs: Any) -> Tensor:
        """The backbone's outputs -> ``[tokens, vocabulary]``, for ``generate``.

        By default the outputs themselves, or their ``logits`` as in Hugging Face models.
        """
        logits: Tensor = outputs if isinstance(outputs, Tensor) else outputs.logits
        return logits.reshape(-1, logits.shape[-1])

    # ---- what Lightning calls -----------------------------------------------------------------------------------

    @property
    def builds_whole(self) -> bool:
        """Whether the subclass builds both halves at once."""
        return type(self).configure_whole is not FlowModule.configure_whole

    def configure_model(self) -> None:
        """Builds the halves that live on this rank, and the others without memory.

        Before a first fit it is checked that packing does not change what the module learns.

        Raises:
            PackingCheckError: packing changes it.
            RuntimeError: another half is needed than the module was built with on this rank.
        """
        self._check_packing()
        self.build_held()

    def training_step(self, batch: StepBatch, batch_idx: int) -> Tensor:
        """Forward and backward of one whole step."""
        return self.with_gradients_made(self._step_runner(batch).training_step(batch, batch_idx))

    def validation_step(self, batch: StepBatch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Forward of one validation step."""
        return self._step_runner(batch).evaluation_step(batch, batch_idx, "val")

    def test_step(self, batch: StepBatch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Forward of one test step."""
        return self._step_runner(batch).evaluation_step(batch, batch_idx, "test")

    def predict_step(self, batch: StepBatch, batch_idx: int, dataloader_idx: int = 0) -> list[Any]:
        """Returns the results of ``backbone_step`` for every microbatch of this rank; empty on encoder ranks."""
        return self._step_runner(batch).predict_step(batch, batch_idx)

    def gradient_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """The 2-norm of the gradients of both halves on all ranks; ``parameters`` are this rank's."""
        return self._step_runner().gradient_norm(parameters)

    def _check_packing(self) -> None:
        try:
            trainer = self.trainer
        except RuntimeError:
            return  # there is none: the module is built by hand
        if not self._checked:
            check_before_fit(self, trainer, {*self.couples, *getattr(trainer.strategy, "couples", ())})
            self._checked = True

    # ---- who runs the steps --------------------------------------------------------------------------------------

    def encoder_fingerprint(self, role: str) -> str:
        """A name of all that an encoder's features follow from beside pixels; see `FlowDataModule(keep_features=...)`.

        Raises:
            FeaturesNotKept: they do not follow from the pixels alone.
        """
        trainer = self.trainer
        computes, data = (trainer.precision, trainer.strategy.root_device.type, self.dtype), trainer.datamodule  # type: ignore[attr-defined]
        return self._fingerprints.of(role, computes, data, trainer.callbacks)  # type: ignore[attr-defined]

    def mark_checked(self) -> None:
        """Says that it needs no packing check: it is a copy that is being checked."""
        self._checked = True

    def agree_on_logged(self, name: str, value: Any) -> Any:
        """Returns the value that ``log`` records outside of microbatches; raises where ranks log different names."""
        return value if self._runner is None else self._runner.agree_on_logged(name, value)

    def attach_runner(self, runner: StepRunner | None) -> None:
        """The strategy says who runs the steps (None: plain Lightning)."""
        self._runner = runner

    def __getstate__(self) -> dict[str, Any]:
        """Without the run that it is in, of which Lightning leaves out the Trainer: so it can be copied and pickled."""
        return {**super().__getstate__(), "_runner": None}

    def _step_runner(self, batch: Any = None) -> StepRunner:
        """Returns the runner of the step of ``batch``, if one is given."""
        if batch is not None and not isinstance(batch, StepBatch):
            raise TypeError(
                f"A FlowModule takes the packed steps of a FlowDataModule, but the loader gave {type(batch).__name__}. "
                "Give fit such a module: trainer.fit(module, datamodule=FlowDataModule(...))."
            )
        if batch is not None and batch.program is None and self.trainer.world_size > 1:  # no loader of a strategy's
            refuse_loader_of_others(self.trainer, batch.shard)
        if self._runner is None or self._runner.trainer is not self.trainer:
            strategy = self.trainer.strategy
            if type(strategy).__name__ not in ("SingleDeviceStrategy", "DDPStrategy"):
                raise TypeError(
                    f"A FlowModule trains under strategy='flowtrain', 'auto' (one device) or 'ddp', but got "
                    f"{type(strategy).__name__}. Change Trainer(strategy=...)."
                )
            self._runner = WholeModuleRunner(self, self.trainer)
        return self._runner

    @classmethod
    def load_from_checkpoint(cls, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        """Lightning's ``load_from_checkpoint``, for plain checkpoints and for flowtrain's directories."""
        if isinstance(checkpoint_path, str | Path) and Path(checkpoint_path).is_dir():
            with plain_file(checkpoint_path, kwargs.get("weights_only")) as path:
                return super().load_from_checkpoint(path, *args, **kwargs)
        return super().load_from_checkpoint(checkpoint_path, *args, **kwargs)
