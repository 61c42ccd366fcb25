"""Sees when a frozen encoder's weights are changed in between: work ahead would then have been done with old ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from flowtrain_lightning.allocator.roles import ENCODER
from flowtrain_lightning.parallel.halves import role_of

if TYPE_CHECKING:
    from flowtrain_lightning.module import FlowModule

_Seen = dict[str, tuple[Tensor, int, int]]
"""Name -> the parameter, where its values lie, and how often they were changed in place."""


class FrozenEncoder:
    """The weights of an encoder that does not train, from step to step.

    A rank that does not hold them sees changes too where a hook makes them on all ranks, so it does not take features
    of the old weights before it is told. What is written through ``parameter.data`` is not seen by anyone.

    Args:
        module: holds them, or their names.
    """

    def __init__(self, module: FlowModule) -> None:
        self._module = module
        self._seen: dict[str, _Seen] = {}

    def note(self, stage: str) -> None:
        """The weights of now are those with which this stage's next steps may be worked ahead."""
        self._seen[stage] = self._look()

    def refuse_changes(self, stage: str) -> None:
        """Raises where they are others by now.

        Raises:
            ValueError: names one of them, and what to do.
        """
        now, then = self._look(), self._seen[stage]
        changed = [name for name in {**then, **now} if not _is_same(now.get(name), then.get(name))]
        if changed:
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            raise ValueError(
                f"Weights of the encoder were changed between two steps: {changed[0]!r}{more}. It is frozen, so "
                "features of later steps may have been made already, with the weights before. Change them in "
                "`on_train_epoch_start`, or set FlowTrainStrategy(placement='colocated'), with which nothing is worked "
                "ahead. To let the encoder train from a step on, `requires_grad_(True)` alone is enough."
            )

    def _look(self) -> _Seen:
        halves = self._module.halves
        return {
            name: (parameter, parameter.data_ptr(), parameter._version)
            for name, parameter in self._module.named_parameters()
            if role_of(name, halves) == ENCODER
        }


def _is_same(one: tuple[Tensor, int, int] | None, other: tuple[Tensor, int, int] | None) -> bool:
    return one is not None and other is not None and one[0] is other[0] and one[1:] == other[1:]
