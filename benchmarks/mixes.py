"""What the runs of `emulate_layouts.py` stand for: modules, devices and data like those that FlowTrain was measured on.

FlowTrain (arXiv 2606.23087) gives neither the sizes of its models' layers nor those of its images. Public models of
about its sizes stand for the former. Images of InfoVQA are large and unlike, those of its industrial data have between
480 and 1,080 lines.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flowtrain_lightning.packing import IntArray

_PICTURES = 256
_MERGED = 4  # patches that become a row of features


@dataclass(frozen=True)
class Mix:
    """A module on a device, and the data that it trains on.

    Attributes:
        model: a name of `flowtrain_lightning.allocator.named_model`.
        device: a name of `flowtrain_lightning.allocator.named_device`, large enough for eight of them.
        tower_trains: else it is frozen, as FlowTrain's.
        images: ``"documents"`` or ``"screens"``.
        words: of a text, at least and less than; a word is a token.
        over_uniform: how many times FlowTrain's throughput is that of Megatron-LM, by the paper.
        over_synchronous: and that of DistTrain.
    """

    model: str
    device: str
    tower_trains: bool
    images: str
    words: tuple[int, int]
    over_uniform: float
    over_synchronous: float

    @property
    def sides(self) -> IntArray:
        """``[pictures, 2]`` height and width of its images, in rows of features."""
        return documents() if self.images == "documents" else screens()


def documents() -> IntArray:
    """Upright pages: half of them have more than 4,096 patches, one in six more than 6,750; 12,288 at most."""
    draw = np.random.default_rng(0)
    rows = np.minimum(4096 * np.exp(0.5 * draw.standard_normal(_PICTURES)), 12_288) / _MERGED
    height = np.sqrt(rows * draw.uniform(1.0, 2.5, _PICTURES))
    sides: IntArray = np.maximum(1, np.rint(np.stack([height, rows / height], 1))).astype(np.int64)
    return sides


def screens() -> IntArray:
    """Frames of 480, 720 and 1,080 lines in patches of 14 x 14 pixels, as many of each."""
    sizes = [[17, 30], [26, 46], [39, 69]]
    return np.resize(np.array(sizes), (_PICTURES, 2))


MIXES = {
    "6B, documents": Mix("qwen2.5-vl-7b", "h100", False, "documents", (10, 30), 1.30, 1.21),
    "32B, documents": Mix("qwen2.5-vl-32b", "h200", False, "documents", (10, 30), 1.34, 1.16),
    "72B, documents": Mix("qwen2.5-vl-72b", "b300", False, "documents", (10, 30), 1.69, 1.35),
    "6B, screens, all trains": Mix("qwen2.5-vl-7b", "h100", True, "screens", (50, 200), 1.31, 1.12),
}
"""FlowTrain's name of the size and what stands for its data -> the mix."""
