"""How the ranks of one role share its work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

Sharding = Literal["replicate", "zero1", "zero2", "zero3", "fsdp"]
"""What a data-parallel rank keeps of the weights, gradients and optimizer states.

``"replicate"`` keeps all, ``"zero1"`` its share of the states, ``"zero2"`` its share of states and gradients,
``"zero3"`` (DeepSpeed) and ``"fsdp"`` (FSDP2) its share of everything.
"""


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism of one role and how its data-parallel ranks hold the weights.

    Attributes:
        data: copies of the role that work on different samples.
        tensor: ranks that share every layer.
        pipeline: ranks that each hold some of the layers.
        context: ranks that share every sequence.
        shard: how the data-parallel ranks hold the weights.

    Raises:
        ValueError: a degree below 1, or an unknown ``shard``.
    """

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    shard: Sharding = "replicate"

    def __post_init__(self) -> None:
        for name, degree in self.degrees.items():
            if degree < 1:
                raise ValueError(f"The {name} degree of a layout is {degree}; it must be at least 1.")
        if self.shard not in get_args(Sharding):
            known = ", ".join(repr(name) for name in get_args(Sharding))
            raise ValueError(f"A layout cannot shard by {self.shard!r}; known are {known}.")

    @property
    def degrees(self) -> dict[str, int]:
        """All degrees by name."""
        return {"data": self.data, "tensor": self.tensor, "pipeline": self.pipeline, "context": self.context}

    @property
    def ranks(self) -> int:
        """Ranks that the layout needs."""
        return self.data * self.tensor * self.pipeline * self.context

    def describe(self) -> str:
        """The layout in a few words, for the log: degrees of 1 are left out, but for ``data``."""
        degrees = [f"{name} {degree}" for name, degree in self.degrees.items() if degree > 1 or name == "data"]
        return ", ".join([*degrees, self.shard])
