"""A reader's hold on an entry."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from flowtrain_lightning.pool.errors import PoolError
from flowtrain_lightning.pool.key import Key


class Lease:
    """A reader's hold on an entry: its owner keeps it until every reader has released its lease.

    Attributes:
        key: the entry's name.
        owner: the rank that put it.
    """

    __slots__ = ("_give_back", "_tensors", "key", "owner")

    def __init__(self, key: Key, owner: int, tensors: tuple[Tensor, ...], give_back: Callable[[Key], None]) -> None:
        self.key = key
        self.owner = owner
        self._tensors: tuple[Tensor, ...] | None = tensors
        self._give_back = give_back

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Views of the entry, on the CPU. After the release their bytes are another entry's.

        Raises:
            PoolError: when the lease was released.
        """
        if self._tensors is None:
            raise PoolError(f"The lease of {self.key} was used after its release. Copy what is needed for longer.")
        return self._tensors

    def release(self) -> None:
        """Give the entry back.

        Raises:
            PoolError: when that was done before.
        """
        if self._tensors is None:
            raise PoolError(f"The lease of {self.key} was released twice.")
        self._tensors = None
        self._give_back(self.key)
