"""PaliGemma: the image and the question, up to the answer, see each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowtrain_lightning.data import IGNORED_LABEL, Features, PackedBatch, PackedMedia
from flowtrain_lightning.models.block_attention import SightMask, attend_in_blocks
from flowtrain_lightning.models.huggingface_vlm import HuggingFaceVLM


class PaliGemmaVLM(HuggingFaceVLM):
    """PaliGemma and PaliGemma 2. See `HuggingFaceVLM` for the arguments.

    The data module must make all images of the tower's size: ``images=images_of(...)``.
    """

    families = ("paligemma",)
    halves: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "encoder": ("model.model.vision_tower", "model.model.multi_modal_projector"),
        "backbone": ("model.model.language_model", "model.lm_head"),
    }

    def pack_backbone(self) -> None:
        """Attention that takes a mask."""
        attend_in_blocks(self._text)

    def encode(self, media: PackedMedia) -> Tensor:
        """Images of one size -> ``[sum(media.rows), width]``, a row of features per patch."""
        features: Tensor = self.model.model.get_image_features(media.images(), return_dict=True).pooler_output
        return features.flatten(0, 1)

    def merge(self, batch: PackedBatch, features: Features) -> dict[str, Any]:
        """The text model's arguments, with who sees whom; positions are counted from 1."""
        arguments = super().merge(batch, features)
        sight = SightMask(batch, prefix_blocks(batch))
        return {**arguments, "position_ids": arguments["position_ids"] + 1, "sight": sight}

    def generate(self, batch: PackedBatch, features: Features) -> list[tuple[int, list[int]]]:
        """Refuses: a token that was generated would be taken for one of the question, and see what follows it."""
        raise NotImplementedError(
            "PaliGemma's predictions are not computed here. Export the model, `flowtrain export --format hf`, and "
            "predict by transformers."
        )

    def _head(self, hidden: Tensor) -> Tensor:
        scores, cap = super()._head(hidden), getattr(self.model.config.text_config, "final_logit_softcapping", None)
        return scores if cap is None else cap * torch.tanh(scores / cap)


def prefix_blocks(batch: PackedBatch) -> Tensor:
    """``[tokens]`` 0 up to the first token that a sequence learns (which is not in it), -1 from there on."""
    predicts = (batch.labels != IGNORED_LABEL).long()
    before = predicts.cumsum(0) - predicts  # targets of the microbatch before a token
    begin = torch.arange(len(predicts), device=predicts.device) - batch.position_ids
    return torch.where(before == before[begin], 0, -1)
