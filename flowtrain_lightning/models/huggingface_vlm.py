"""A vision-language model of Hugging Face as a FlowModule; families add what only they do."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from flowtrain_lightning.allocator import BACKBONE
from flowtrain_lightning.compute.cross_entropy import summed_cross_entropy
from flowtrain_lightning.data import Features, FlowDataModule, PackedBatch
from flowtrain_lightning.models.between_samples import refuse_balancing_loss, refuse_growing_positions
from flowtrain_lightning.models.cached_generation import generate_with_cache, takes_cache
from flowtrain_lightning.models.checked_twin import checked_twin
from flowtrain_lightning.models.family_traits import token_kinds
from flowtrain_lightning.models.liger import Kernels, refuse_unknown_kernels, use_kernels
from flowtrain_lightning.models.own_forward import own_outputs, refuse_seeing_ahead
from flowtrain_lightning.models.packed_attention import pack_attention, refuse_attention_dropout, sequence_bounds
from flowtrain_lightning.models.packed_scans import refuse_sharing
from flowtrain_lightning.models.published_config import (
    end_token,
    image_token_id,
    read_config,
    read_generation,
    read_in_this_thread,
)
from flowtrain_lightning.models.reading import ReadingModule
from flowtrain_lightning.models.recomputing import Recomputing, recompute_layers, refuse_unknown_recomputing
from flowtrain_lightning.models.refused_arguments import refuse_other_arguments
from flowtrain_lightning.models.tensor_plans import decoder_plan, perceptron_plan
from flowtrain_lightning.models.trained_weights import (
    PRECISION,
    adapters_as_dictionary,
    add_adapters,
    keep_frozen_in_bf16,
    save_in_widest,
)
from flowtrain_lightning.packing_check.twins import CheckedTwin
from flowtrain_lightning.parallel import TensorPlan
from flowtrain_lightning.parallel.blocks import Compile, compile_blocks

if TYPE_CHECKING:
    from typing_extensions import Self


class HuggingFaceVLM(ReadingModule):
    """The base of all families: built by ``transformers``, packed attention, loss at target tokens only, AdamW.

    A subclass says which ``families`` it trains, names the ``halves`` by path and defines ``encode``; `QwenVLM` and
    `LlavaVLM` do. ``self.model`` is the Hugging Face model. After training
    ``QwenVLM.load_from_checkpoint("last.ckpt").save_pretrained("folder")`` writes a folder that everybody can load, as
    ``flowtrain export --format hf last.ckpt folder`` does.

    Args:
        model: a name or a folder of Hugging Face, whose weights are loaded; or a ``transformers`` config (or its
            dictionary), to begin from random weights. Checkpoints keep the config, so that they need neither.
        frozen: path or paths of modules, or of single parameters, of the Hugging Face model that do not train, such as
            ``"model.visual"``.
        adapters: train small matrices beside the weights, which stay as they are: a config of ``peft`` such as
            ``LoraConfig(target_modules="all-linear")``, or its dictionary. What is saved is then a folder of adapters,
            which ``peft.PeftModel.from_pretrained`` opens.
        frozen_in_bf16: linear layers and experts that do not train, as beside adapters, keep their weights in bfloat16:
            2 bytes a parameter for 4. For ``precision="bf16-mixed"``, which computes the same with them, to the bit
            where they were published in bfloat16.
        recompute: keep only what each layer is given and compute the rest a second time for the backward (gradient
            checkpointing): far less memory, up to a third more time. ``"selective"`` also keeps what products of
            matrices and attention give: less memory than without, for a few percent more time.
        compile: ``"blocks"`` lets PyTorch compile the repeated layers of both halves, once for all numbers of tokens;
            ``"none"`` leaves them as they are.
        kernels: ``"liger"`` runs norms and gated perceptrons by Liger's kernels on GPUs; ``"none"`` as they are.
        lr: of AdamW, which is fused on GPUs.
        weight_decay: of AdamW, on matrices only.
        max_new_tokens: how many tokens a prediction has at most; it ends sooner at the token that the model ends with.
        processor: the name or folder of Hugging Face whose tokenizer, chat template and image processor the data module
            takes where it is given none; None: that of ``model``, where it is a name or folder.
        min_pixels: of an image, in place of the processor's own; for Qwen alone.
        max_pixels: of an image, in place of the processor's own; for Qwen alone.
        generation: what ``transformers``' own ``generate`` does, as the dictionary of a ``GenerationConfig``; None: as
            the name or folder says. It only goes into the folder that is saved.

    Attributes:
        families: the ``model_type`` of the configs that the class trains.
        model: the Hugging Face model, once it is built.
    """

    families: ClassVar[tuple[str, ...]] = ()
    __signature__: ClassVar[inspect.Signature]

    def __init_subclass__(cls, **settings: Any) -> None:
        """Shows the arguments of ``__init__`` as those of the class, in place of those of ``__new__``."""
        super().__init_subclass__(**settings)
        _, *arguments = inspect.signature(cls.__init__).parameters.values()
        cls.__signature__ = inspect.Signature(arguments)

    def __new__(cls, *_: Any, **settings: Any) -> Self:
        """Refuses arguments that ``transformers`` would take here, in sentences on what they are called."""
        refuse_other_arguments(cls.__init__, cls.__name__, settings)
        return super().__new__(cls)

    def __init__(
        self,
        model: str | Path | Mapping[str, Any] | Any,
        *,
        frozen: str | Sequence[str] = (),
        adapters: Mapping[str, Any] | Any | None = None,
        frozen_in_bf16: bool = False,
        recompute: Recomputing = False,
        compile: Compile = "none",
        kernels: Kernels = "none",
        lr: float = 1e-5,
        weight_decay: float = 0.0,
        max_new_tokens: int = 32,
        processor: str | Path | None = None,
        min_pixels: int | None = None,
        max_pixels: int | None = None,
        generation: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        refuse_unknown_recomputing(recompute)
        refuse_unknown_kernels(kernels, compile)
        self._source = model if isinstance(model, str | Path) else None
        self.reads_files = self._source is not None and type(self).configure_whole.__module__.startswith(__package__)
        config = read_config(model)
        self.check_config(config)
        refuse_balancing_loss(config)
        if generation is None and self._source is not None:
            generation = read_generation(self._source)
        self.save_hyperparameters(
            {
                "model": config.to_dict(),
                "frozen": [frozen] if isinstance(frozen, str) else list(frozen),
                "adapters": None if adapters is None else adapters_as_dictionary(adapters),
                "frozen_in_bf16": frozen_in_bf16,
                "recompute": recompute,
                "compile": compile,
                "kernels": kernels,
                "lr": lr,
                "weight_decay": weight_decay,
                "max_new_tokens": max_new_tokens,
                "processor": None if (processor or self._source) is None else str(processor or self._source),
                "min_pixels": min_pixels,
                "max_pixels": max_pixels,
                "generation": None if generation is None else dict(generation),
            }
        )
        self.max_new_tokens = max_new_tokens
        self.end_token = end_token(config, generation)

    def check_config(self, config: Any) -> None:
        """Refuses configs that the class cannot train.

        Raises:
            ValueError: of another family.
        """
        if config.model_type not in self.families:
            raise ValueError(
                f"{type(self).__name__} does not train models of type {config.model_type!r}. QwenVLM trains qwen2_vl "
                "and its like, LlavaVLM trains llava; flow.models.from_pretrained(FOLDER) finds it (docs/models.md)."
            )

    # ---- what it reads ------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Refuses data that write images by another token than the model looks for, and settings that do not fit.

        Raises:
            ValueError: says what does not fit.
        """
        if self.hparams["frozen_in_bf16"] and self.trainer.precision != PRECISION:
            raise ValueError(
                f"frozen_in_bf16 keeps weights in bfloat16, but Trainer(precision={self.trainer.precision!r}) computes "
                f"with them as they are. Set precision={PRECISION!r}, or leave frozen_in_bf16 away."
            )
        if stage == "fit":
            refuse_attention_dropout(read_config(self.hparams["model"]).get_text_config())
        data = getattr(self.trainer, "datamodule", None)
        if not isinstance(data, FlowDataModule):
            return
        try:
            written = data.template.image_id(data.tokenizer)
        except ValueError:
            return  # no such token: no image can be written, and whoever has one was told so
        wanted = image_token_id(read_config(self.hparams["model"]))
        if written != wanted:
            raise ValueError(
                f"The data module writes token {written} for a row of features, but the model looks for {wanted} "
                "(image_token_id of its config). Give the data module the tokenizer and template of this model, or "
                "none: it then takes the model's own."
            )

    # ---- building -----------------------------------------------------------------------------------------------

    def configure_whole(self) -> None:
        """Builds the model, from the name or folder or at random, in the precision of the Trainer."""
        from transformers import AutoModelForImageTextToText as Maker
        from transformers import GenerationConfig

        dtype = torch.get_default_dtype()
        if self._source is not None and torch.get_default_device().type != "meta":
            # Lightning's device would be taken for a device_map, which needs accelerate.
            with torch.device("cpu"), read_in_this_thread() if self.holds_parts else nullcontext():
                self.model = Maker.from_pretrained(self._source, dtype=dtype, trust_remote_code=False)
            self._keep_apart()
        else:
            self.model = Maker.from_config(read_config(self.hparams["model"]), dtype=dtype, trust_remote_code=False)
        if self.hparams["generation"] is not None:
            self.model.generation_config = GenerationConfig(**self.hparams["generation"])
        self.model.train()  # from_pretrained leaves it in evaluation mode
        self.pack_backbone()
        refuse_growing_positions(self._text)
        if self.hparams["kernels"] == "liger":
            use_kernels(self.model)
        if self.hparams["adapters"] is not None:
            add_adapters(self.model, self.hparams["adapters"])
        recompute_layers(self.model, self.hparams["recompute"])
        if self.hparams["compile"] == "blocks":
            compile_blocks(self.model)
        for path in self.hparams["frozen"]:
            self._frozen(path).requires_grad_(False)
        self.place_projector()
        if self.hparams["frozen_in_bf16"]:
            keep_frozen_in_bf16(self.model)

    def pack_backbone(self) -> None:
        """Lets the text model attend within packed sequences, each token to those before it.

        Raises:
            ValueError: in this model some tokens see those behind them.
        """
        refuse_seeing_ahead(self.model)
        pack_attention(self._text)

    def step_alone(self, batch: PackedBatch, features: Features) -> tuple[Tensor, int] | None:
        """One sample by the model's own forward and masks, for the packing check.

        None where the model does not take given features, and for a class that brings masks of its own.
        """
        if type(self).pack_backbone is not HuggingFaceVLM.pack_backbone:
            return None
        projected = self.projected(features)
        positions = self.merge(batch, features)["position_ids"]
        outputs = own_outputs(self.model, self._text, batch, projected, positions)
        return None if outputs is None else self.loss(outputs, batch)

    def token_kinds(self, batch: PackedBatch) -> dict[str, Tensor]:
        """What the model's own forward is told of the tokens of one sample beside their ids."""
        return token_kinds(self.model, batch.tokens, batch.media_positions.get("image"))

    def checked_twin(self) -> CheckedTwin | None:
        """A small model of the same classes and settings, for the packing check; None of a class of the user's own."""
        return checked_twin(self) if type(self).__module__.startswith(__package__) else None

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Moves and converts the weights, but leaves tables of frequencies as exact as they were built.

        Lightning converts whole modules for ``precision="bf16-true"``, and rotary positions in bfloat16 would be wrong
        by whole turns. ``transformers`` itself keeps them in float32 when it loads a model in bfloat16.
        """
        tables = list(_tables(self))
        super().to(*args, **kwargs)
        for owner, name, table in tables:
            if not table.is_meta:
                setattr(owner, name, table.to(getattr(owner, name).device))
        return self

    def _keep_apart(self) -> None:
        """Leaves two tables of tokens two, though the config calls them one, where the folder holds both.

        Checkpoints keep the config, which says so from now on.
        """
        config = self.model.config
        is_one = self.model.get_output_embeddings().weight is self.model.get_input_embeddings().weight
        if is_one or not config.tie_word_embeddings:
            return
        for part in (config, config.get_text_config()):
            part.tie_word_embeddings = False
        self.hparams["model"] = config.to_dict()

    def save_pretrained(self, folder: str | Path) -> None:
        """Writes what ``from_pretrained`` of ``transformers`` opens: the model and, where one is known, its processor.

        Of a model with adapters these alone are written, as ``peft`` opens them.

        Args:
            folder: is made where it is not there.
        """
        save_in_widest(self.model, folder)
        if self.processor is not None:
            self.processor.copy_to(Path(folder))

    @property
    def _text(self) -> Any:
        return self.get_submodule(self.halves["backbone"][0])

    def _frozen(self, path: str) -> nn.Module | nn.Parameter:
        part: nn.Module | nn.Parameter | None = dict(self.model.named_modules()).get(path)
        part = part or dict(self.model.named_parameters()).get(path)
        if part is None:
            raise ValueError(
                f"frozen names {path!r}, but {type(self.model).__name__} has no such module. Name one as in "
                f"named_modules(), such as {self.halves['encoder'][0].removeprefix('model.')!r}."
            )
        return part

    # ---- computing ----------------------------------------------------------------------------------------------

    def merge(self, batch: PackedBatch, features: Features) -> dict[str, Any]:
        """The text model's arguments: token embeddings, with features where the microbatch's media items go."""
        return self.place_features(batch, self.projected(features))

    def place_features(self, batch: PackedBatch, features: Features) -> dict[str, Any]:
        """The text model's arguments: token embeddings, with projected features where media items go.

        Raises:
            TypeError: features are a tuple of tensors, of which only a `merge` of your own knows what they are for.
        """
        embeddings = self._text.get_input_embeddings()(batch.tokens)
        for modality, rows in features.items():
            if isinstance(rows, tuple):
                raise TypeError(
                    f"{type(self).__name__}.encode returns a tuple of features, but HuggingFaceVLM.merge takes one "
                    "tensor only. Define merge too, which says what the others are for."
                )
            embeddings = embeddings.index_copy(0, batch.media_positions[modality], rows.to(embeddings.dtype))
        return {
            "inputs_embeds": embeddings[None],
            "position_ids": batch.position_ids[None],
            "use_cache": False,
            **sequence_bounds(batch),
        }

    def loss(self, outputs: Any, batch: PackedBatch) -> tuple[Tensor, int]:
        """Summed cross entropy. Logits, which are the widest tensors of all, are made at target tokens only."""
        hidden = outputs.last_hidden_state[0].index_select(0, batch.targets)
        labels = batch.labels.index_select(0, batch.targets)
        return summed_cross_entropy(self._head, hidden, labels), len(batch.targets)

    def generate(self, batch: PackedBatch, features: Features) -> list[tuple[int, list[int]]]:
        """Greedy continuation of every sequence, by ``transformers``' own ``generate`` with its cache.

        Where that cannot take what ``merge`` gives (Qwen3-VL's images, Gemma 3), ranks share weights, or each holds a
        stage, the whole sequences are computed anew for every token, with the same result.

        Returns:
            data set index and new token ids of every sequence.
        """
        if self.role_graph.trunk in self.staged:
            return super().generate(batch, features)
        arguments = self.merge(batch, features)
        if not takes_cache(self.model, self._text, batch, arguments):
            return super().generate(batch, features)
        return generate_with_cache(self.model, self._text, batch, arguments, self.max_new_tokens, self.end_token)

    def logits(self, outputs: Any) -> Tensor:
        """``[tokens, vocabulary]``, for ``generate``."""
        return self._head(outputs.last_hidden_state[0])

    def _head(self, hidden: Tensor) -> Tensor:
        scores: Tensor = self.model.get_output_embeddings()(hidden)
        return scores

    def tensor_plan(self, role: str, ranks: int) -> TensorPlan:
        """Layers, embedding and head of the decoder; perceptrons of the tower."""
        if role == BACKBONE:
            names = {module: name for name, module in self.named_modules()}
            return decoder_plan(self._text, self.model.get_output_embeddings(), names, ranks)
        return perceptron_plan({path: self.get_submodule(path) for path in self.halves[role]}, ranks)

    def slice_tokens(self, arguments: dict[str, Any], own: slice) -> dict[str, Any]:
        """Embeddings and positions of some tokens."""
        refuse_sharing(self._text, "context")
        embeddings, positions = arguments["inputs_embeds"], arguments["position_ids"]
        return {**arguments, "inputs_embeds": embeddings[:, own], "position_ids": positions[..., own]}

    def configure_optimizers(self) -> Any:
        """AdamW on what trains; matrices decay, vectors do not."""
        training = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [p for p in training if p.ndim > 1], "weight_decay": self.hparams["weight_decay"]},
            {"params": [p for p in training if p.ndim <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.hparams["lr"])
        if all(parameter.is_cuda or parameter.is_meta for parameter in training):
            for group in optimizer.param_groups:  # not by AdamW's argument, which refuses what lives on other ranks
                group["fused"] = True
        return optimizer


def _tables(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Owner, name and values of the floating-point buffers that no checkpoint holds."""
    saved = module.state_dict().keys()
    for full_name, buffer in module.named_buffers():
        if buffer.is_floating_point() and full_name not in saved:
            path, _, name = full_name.rpartition(".")
            yield module.get_submodule(path), name, buffer
