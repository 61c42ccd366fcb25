"""Says once which media are too large for an encoder batch, and which stay whole though they have parts."""

from __future__ import annotations

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from flowtrain_lightning.packing import SampleSizes


class LargeMedia:
    """Looks at the media of every step until both have been said.

    Args:
        cut: media are dealt in pieces.
    """

    def __init__(self, *, cut: bool) -> None:
        self._told_of_budget, self._told_of_whole = False, cut

    def tell(self, sizes: SampleSizes, encoder_budget: int, most_patches: int) -> None:
        """Looks at a step.

        Args:
            sizes: of its samples.
            encoder_budget: patches of an encoder batch.
            most_patches: of a piece, where media are dealt in pieces.
        """
        largest = int(sizes.media_patches.max(initial=0))
        if encoder_budget < largest and not self._told_of_budget:
            self._told_of_budget = True
            rank_zero_warn(
                f"A media item has {largest:,} patches, more than encoder_budget={encoder_budget:,}, so it is an "
                "encoder batch by itself, and needs as much more memory. Let images and videos be smaller "
                "(ImageProcessor(max_pixels=...)), or raise FlowDataModule(encoder_budget=...) and the memory that is "
                "planned for it."
            )
        if self._told_of_whole or sizes.media_parts is None:
            return
        in_parts = sizes.media_patches[sizes.media_parts > 1]
        if (largest := int(in_parts.max(initial=0))) > most_patches:
            self._told_of_whole = True
            rank_zero_info(
                f"Pictures in tiles and clips stay whole, such as one of {largest:,} patches, since encode does not "
                "say that it takes their parts apart (FlowModule.encodes_parts_apart)."
            )
