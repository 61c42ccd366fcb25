"""Modes of torch that count the bytes of what is alive, and cast as autocast does on a GPU, without a device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode  # they have no public names
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode  # nor has this

COMPUTING = torch.bfloat16
"""The type that products have under mixed precision."""


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, counts the bytes of what operations have made and nobody has let go of.

    Args:
        known: tensors that are there already; views of them do not count.
        fake: the mode of what is counted. DTensor tries operations on whole tensors to learn their shapes, in a mode
            of its own.

    Attributes:
        now: at present.
        most: at most so far.
    """

    def __init__(self, known: Iterable[Tensor], fake: FakeTensorMode | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fake = fake
        self._known = [each.untyped_storage() for each in known]
        self._ignored = {storage._cdata for storage in self._known}  # what tells storages apart
        self.now = 0
        self.most = 0
        self._storages: dict[int, tuple[weakref.ref[torch.UntypedStorage], int]] = {}
        self._is_paused = False

    def restart(self) -> int:
        """The most so far, which from now on counts anew."""
        most, self.most = self.most, self.now
        return most

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, what is made does not count, nor do views of it ever."""
        self._is_paused = True
        yield
        self._is_paused = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs one operation."""
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # it becomes operations on this rank's part, which come here
        if func.namespace in _COMMUNICATES:  # FSDP2 gives and takes the bytes of gathered weights between these
            for key, (held, _) in list(self._storages.items()):
                if (storage := held()) is not None:
                    self._hold(key, held, storage.nbytes())
        result = func(*args, **(kwargs or {}))
        if self._is_paused:
            self._known += [made.untyped_storage() for made in _tensors(result)]
            self._ignored = {storage._cdata for storage in self._known}
        else:
            for made in _tensors(result):
                if isinstance(made, FakeTensor) and made.fake_mode is not self._fake:
                    continue
                storage = made.untyped_storage()
                key = storage._cdata
                if key in self._ignored:
                    continue
                self._hold(key, weakref.ref(storage, partial(self._let_go, key)), storage.nbytes())
        self.most = max(self.most, self.now)
        return result

    def _hold(self, key: int, held: weakref.ref[torch.UntypedStorage], size: int) -> None:
        self.now += size - self._storages.get(key, (held, 0))[1]
        self._storages[key] = held, size

    def _let_go(self, key: int, held: weakref.ref[torch.UntypedStorage]) -> None:
        if self._storages.get(key, (None, 0))[0] is held:
            self.now -= self._storages.pop(key)[1]


_COMMUNICATES = ("fsdp", "c10d", "_c10d_functional")


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, tuple | list):
        for each in result:
            yield from _tensors(each)


class EmulatedAutocast(TorchFunctionMode):
    """What autocast does on a GPU, on the meta device, where there is none: products in bfloat16.

    Args:
        live: does not count the copies of weights, which autocast keeps for the whole forward.
    """

    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self._live = live
        self._copies: dict[int, Tensor] = {}

    @property
    def copied_bytes(self) -> int:
        """Bytes of the copies of weights."""
        return sum(copy.nbytes for copy in self._copies.values())

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs one of torch's functions."""
        if func in _PRODUCTS:
            args = tuple(self._cast(each) for each in args)
        return func(*args, **(kwargs or {}))

    def _cast(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            return value
        if not isinstance(value, nn.Parameter):
            return value.to(COMPUTING)
        if id(value) not in self._copies:
            with self._live.paused():
                self._copies[id(value)] = value.to(COMPUTING)
        return self._copies[id(value)]


_PRODUCTS = {
    functional.linear,
    functional.conv2d,
    functional.conv3d,
    functional.scaled_dot_product_attention,
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
    torch.bmm,
}
