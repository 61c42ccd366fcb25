"""A lease: a reader's hold on an entry until it gives it back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from flowtrain_lightning.pool.entry import Key
from flowtrain_lightning.pool.pool_errors import PoolError


@dataclass(slots=True, eq=False)
class Lease:
    """A reader's hold on an entry: its owner keeps it until every reader has released its lease.

    Attributes:
        key: the entry's name.
        owner: the rank that put it.
        address: where its owner keeps it; see `Address`.
    """

    key: Key
    owner: int
    address: int
    _end: Callable[[Key, int, int], None] = field(repr=False)
    _tensors: tuple[Tensor, ...] | None = field(repr=False)

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Views of the entry. After the release their bytes are another entry's.

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
        self._end(self.key, self.owner, self.address)
