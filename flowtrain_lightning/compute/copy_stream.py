"""Copies on streams of their own, so that what is fetched ahead holds back nothing that is computed meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

_NOTHING = nullcontext()


class CopyStream:
    """A stream of a device for copies; on a CPU, where copies are done at once, nothing.

    Were copies given to the stream that computes, it would wait for all that they wait for: for features of the next
    microbatch, say, which an encoder is still making while those of this one have long been here.

    Args:
        device: on which this rank computes.

    Attributes:
        is_late: copies are done after they were asked for.
    """

    def __init__(self, device: torch.device) -> None:
        self.is_late = device.type == "cuda"
        self._stream: Any = torch.cuda.Stream(device) if self.is_late else None  # type: ignore[no-untyped-call]

    def copying(self) -> AbstractContextManager[Any]:
        """Inside, copies and the memory for them are this stream's."""
        return _NOTHING if self._stream is None else torch.cuda.stream(self._stream)

    def hand_over(self, tensors: Iterable[Tensor | None]) -> None:
        """Lets the computing stream wait for all copies so far, before it uses these tensors. The host goes on."""
        if self._stream is None:
            return
        computing = torch.cuda.current_stream(self._stream.device)
        computing.wait_stream(self._stream)
        for tensor in tensors:
            if tensor is not None:  # its memory would be the copies' again as soon as it is dropped
                tensor.record_stream(computing)
