"""PaliGemma: the image and the question, up to the answer, see each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from flowtrain_lightning.data import IGNORED_LABEL, Features, PackedBatch
from flowtrain_lightning.models.block_attention import SightMask
from flowtrain_lightning.models.gemma import GemmaFamilyVLM


class PaliGemmaVLM(GemmaFamilyVLM):
    """PaliGemma and PaliGemma 2. See `HuggingFaceVLM` for the arguments."""

    families = ("paligemma",)

    def merge(self, batch: PackedBatch, features: Features) -> dict[str, Any]:
        """The text model's arguments, with who sees whom; positions are counted from 1."""
        arguments = super().merge(batch, features)
        sight = SightMask(batch, prefix_blocks(batch))
        return {**arguments, "position_ids": arguments["position_ids"] + 1, "sight": sight}

    def token_kinds(self, batch: PackedBatch) -> dict[str, Tensor]:
        """Tells the question from the answer, which begins with the first token that is learned."""
        learned = batch.labels[:-1] != IGNORED_LABEL
        return {"token_type_ids": pad(learned.cumsum(0).clamp(max=1), (1, 0))[None]}

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
