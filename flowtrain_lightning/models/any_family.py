"""Any family of Hugging Face that takes given features: encoded and merged by its own code, packed by ours."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from flowtrain_lightning.data import Features, PackedBatch, PackedMedia
from flowtrain_lightning.models.asked_images import AskedImages
from flowtrain_lightning.models.block_attention import SightMask
from flowtrain_lightning.models.checked_twin import checked_twin, settings_of
from flowtrain_lightning.models.encoder_inputs import (
    Arguments,
    EncoderInputs,
    PatchInputs,
    joined,
    sound_arguments,
)
from flowtrain_lightning.models.family_traits import rows_of, whole_of
from flowtrain_lightning.models.found_traits import traits_of
from flowtrain_lightning.models.huggingface_vlm import HuggingFaceVLM
from flowtrain_lightning.models.kept_certificates import certificate_of
from flowtrain_lightning.models.own_merge import own_merge, pack_decoder
from flowtrain_lightning.models.own_positions import positions_of_rows
from flowtrain_lightning.models.packed_experts import pack_experts
from flowtrain_lightning.models.published_config import image_ends, image_token_id, read_config
from flowtrain_lightning.models.twin_pictures import usual_images
from flowtrain_lightning.packing_check.findings import Finding
from flowtrain_lightning.packing_check.twins import CheckedTwin

_OFFSETS = "offsets"


class AnyVLM(HuggingFaceVLM):
    """A family without a class of its own here, on images and, if it hears, audio. For arguments see `HuggingFaceVLM`.

    Which parameters belong to which half, in which form features go over, and which tokens see which is found out on a
    small twin of the model. ``flowtrain check`` says whether what comes of it is exact.
    """

    def __init__(self, model: str | Path | Mapping[str, Any] | Any, **settings: Any) -> None:
        super().__init__(model, **settings)
        self.traits = traits_of(read_config(self.hparams["model"]))
        self.encodes_parts_apart = self.traits.apart and not self.traits.rotary  # positions are of whole images
        halves = {role: tuple(f"model.{path}" for path in paths) for role, paths in self.traits.halves.items()}
        eye = "encoder_image" if self.traits.hears else "encoder"
        halves[eye] += tuple(f"model.{_inside(path)}" for path in self.traits.loose)
        self.halves = halves

    def check_config(self, config: Any) -> None:
        """Takes any family; what it cannot train, its twin shows."""

    def configure_whole(self) -> None:
        """Builds the model; parameters of the encoder beside its modules get a module to lie in."""
        super().configure_whole()
        self._give_modules()

    def pack_backbone(self) -> None:
        """Lets the decoder attend within packed sequences, by masks where it has windows or image tokens see ahead."""
        pack_decoder(self._text, self.traits.sight)
        if any(isinstance(getattr(part, "gate_up_proj", None), nn.Parameter) for part in self._text.modules()):
            pack_experts(self._text)

    def prepare_media(self, media: PackedMedia) -> dict[str, Tensor]:
        """Offsets of M-RoPE, by the model's own rule; those of audio are none, since it is counted as text is."""
        if not self.traits.rotary or media.modality == "audio":
            return {}
        config = self.model.config
        items = zip(self._inputs.of_items(media), media.rows, strict=True)
        whole, token, ends = whole_of(self.model), image_token_id(config), image_ends(config)
        return {_OFFSETS: torch.cat([positions_of_rows(whole, item, rows, token, ends) for item, rows in items])}

    def encode(self, media: PackedMedia) -> Tensor | tuple[Tensor, ...]:
        """Images or audio -> ``[sum(media.rows), width]``; of images more of these for deeper layers, and offsets.

        Raises:
            ValueError: the encoder makes another number of rows than there are tokens for.
        """
        if media.modality == "audio":
            return self._heard(media)
        items = [_on(item, media.pixels.device, media.patches.dtype) for item in self._inputs.of_items(media)]
        calls = [joined(items)] if self._takes_several and len(items) > 1 else items
        outputs = [rows_of(whole_of(self.model).get_image_features(**call, return_dict=True)) for call in calls]
        levels = [torch.cat(level) for level in zip(*outputs, strict=True)]
        if len(levels[0]) != sum(media.rows):
            raise ValueError(
                f"The encoder of {type(self.model).__name__} makes {len(levels[0])} rows of features of images for "
                f"which the text has {sum(media.rows)} tokens. Give the data module the images of this model: "
                "FlowDataModule(images=model.images)."
            )
        if self.traits.rotary:
            inputs = media.inputs or self.prepare_media(media)
            levels.append(inputs[_OFFSETS].to(media.pixels.device))
        return levels[0] if len(levels) == 1 else tuple(levels)

    def merge(self, batch: PackedBatch, features: Features) -> dict[str, Any]:
        """The arguments that the model's own forward passes to its decoder for these tokens and features."""
        rows = features.get("image", ())
        levels = [rows] if isinstance(rows, Tensor) else list(rows)
        offsets = levels.pop() if levels and self.traits.rotary else None
        sounds = features.get("audio")
        assert not isinstance(sounds, tuple), "encode gives one tensor of audio"
        return own_merge(self.model, self.traits, batch, levels, offsets, sounds)

    def checked_twin(self) -> CheckedTwin | None:
        """See `HuggingFaceVLM.checked_twin`; beside it, whether the family's certificate refuses it."""
        found = certificate_of(read_config(self.hparams["model"]), AnyVLM, settings_of(self))
        kind: Literal["encode", "backbone"] = "encode" if found.half == "encoder" else "backbone"
        refused = () if found.trains else (Finding(kind, found.sentence),)
        return checked_twin(self, refused) if type(self) is AnyVLM else None

    def slice_tokens(self, arguments: dict[str, Any], own: slice) -> dict[str, Any]:
        """See `HuggingFaceVLM.slice_tokens`.

        Raises:
            NotImplementedError: the decoder is given more of each token than embeddings and positions.
        """
        bounds = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
        others = arguments.keys() - {"inputs_embeds", "position_ids", "use_cache", *bounds}
        if unknown := sorted(name for name in others if isinstance(arguments[name], Tensor | list | SightMask)):
            raise NotImplementedError(
                f"{type(self.model).__name__} gives its decoder {', '.join(unknown)}, which context ranks cannot "
                "share. Give the backbone a layout without a context degree."
            )
        return super().slice_tokens(arguments, own)

    def save_pretrained(self, folder: str | Path) -> None:
        """See `HuggingFaceVLM`; parameters are saved by the names that ``transformers`` knows."""
        for path in self.traits.loose:
            owner, _, name = path.rpartition(".")
            parametrize.remove_parametrizations(self.model.get_submodule(owner), name, leave_parametrized=False)
        try:
            super().save_pretrained(folder)
        finally:
            self._give_modules()

    def _heard(self, media: PackedMedia) -> Tensor:
        """``[sum(media.rows), width]`` features of clips of audio."""
        if not self.traits.hears:
            raise ValueError(f"{type(self.model).__name__} does not hear; leave records with audio out of its data.")
        clips = torch.split(media.patches, media.grid[:, 1].tolist())
        whole = whole_of(self.model)
        # Each alone: some towers fill up short clips to the longest, and then hear the filling.
        found = [whole.get_audio_features(**sound_arguments(clip), return_dict=True) for clip in clips]
        rows = torch.cat([rows_of(each)[0] for each in found])
        if len(rows) != sum(media.rows):
            raise ValueError(
                f"The encoder of {type(self.model).__name__} makes {len(rows)} rows of features of audio for which the "
                f"text has {sum(media.rows)} tokens. Give the data module the audio of this model: "
                "FlowDataModule(audio=model.audio)."
            )
        return rows

    @cached_property
    def _takes_several(self) -> bool:
        """Whether images are encoded in one call: where that was tried with images in their form."""
        alike = isinstance(self._inputs, PatchInputs) == self.traits.made_up or "image_grid_thw" in self.traits.names
        return self.traits.together and alike

    @cached_property
    def _inputs(self) -> EncoderInputs:
        if self.processor is not None and isinstance(self.processor.images, AskedImages):
            return self.processor.images.inputs
        if not self.traits.made_up:
            return usual_images(self.model, self.model.config).inputs
        inputs = PatchInputs.of(whole_of(self.model), self.model.config)
        return replace(
            inputs, names=tuple(name for name in inputs.names if name != "image_sizes" or name in self.traits.names)
        )

    def _head(self, hidden: Tensor) -> Tensor:
        """Logits by the model's own forward behind its decoder, which may scale or bound them."""
        whole = whole_of(self.model)
        if whole is self.model:
            return super()._head(hidden)
        decoded = copy.copy(
            self.model
        )  # and not the model itself: the loader's thread asks that for positions meanwhile
        parts = {name: _Decoded(hidden) if child is whole else child for name, child in self.model.named_children()}
        decoded.__dict__["_modules"] = parts
        logits: Tensor = decoded(input_ids=None, inputs_embeds=hidden[None], return_dict=True).logits[0]
        return logits

    def _give_modules(self) -> None:
        for path in self.traits.loose:
            owner, _, name = path.rpartition(".")
            parametrize.register_parametrization(self.model.get_submodule(owner), name, nn.Identity(), unsafe=True)


class _Decoded(nn.Module):
    """Stands for encoder and decoder, which have run already."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self._hidden = hidden[None]

    def forward(self, *_: Any, **__: Any) -> Any:
        return _Outputs(self._hidden)


class _Outputs(SimpleNamespace):
    """Outputs of a model of ``transformers`` of which only hidden states are known."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__(last_hidden_state=hidden)

    def __getitem__(self, number: int) -> Any:
        return self.last_hidden_state if number == 0 else None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)


def _inside(path: str) -> str:
    owner, _, name = path.rpartition(".")
    return f"{owner}.parametrizations.{name}"


def _on(arguments: Arguments, device: torch.device, dtype: torch.dtype) -> Arguments:
    return {
        name: value.to(device, dtype if value.is_floating_point() else value.dtype) for name, value in arguments.items()
    }
