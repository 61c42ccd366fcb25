"""Notices that an encoder trains and yet gets no gradient: then the backbone does not use its features."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import nn

_STEPS = 10
"""Some models begin with gates that are closed, and pass no gradient in their first steps."""


class UnusedFeatures:
    """Looks at the encoder's gradients until it has seen one that is not zero."""

    def __init__(self) -> None:
        self._steps = 0
        self._done = False

    def look(self, parameters: Sequence[nn.Parameter]) -> None:
        """After a step in which the encoder trained.

        Args:
            parameters: of the encoder, with the step's gradients.
        """
        if self._done:
            return
        self._steps += 1
        if any(bool(p.grad.any()) for p in parameters if p.grad is not None):
            self._done = True
        elif self._steps == _STEPS:
            self._done = True
            warnings.warn(
                f"The encoder trains, but in {_STEPS} steps with media none of its weights got a gradient that is not "
                "zero. Does `merge` use the features, and does `encode` return them without `detach` or `no_grad`? If "
                "the encoder is to stay as it is, freeze it (`self.encoder.requires_grad_(False)`): it then works "
                "ahead of the backbone.",
                stacklevel=2,
            )
