"""Building a module without its weights: what makes them is noted, and repeated later, where they belong.

Inside of `noting`, tensors that are to become weights have shapes but no memory (meta device), and every
operation that creates or writes one is noted. `BuildingLog.make` repeats the operations in their order, hands out each
weight as soon as it is final, and forgets it. Numbers are drawn in the order in which one process draws them, also
those of weights that nobody wants here, so what is made is equal to the bit to what is built at once.

Tables that modules read while they are built (``arange``, ``linspace``, whole numbers) are computed at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

META = torch.device("meta")
_aten = torch.ops.aten


def _all(*names: str) -> set[Any]:
    return {getattr(_aten, name) for name in names}


_EMPTY = _all("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
BLANK = _EMPTY | _all(
    "full", "full_like", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "zeros", "zeros_like"
)
"""Operations that make tensors which are about to be written."""

_OVERWRITE = _all("copy_", "exponential_", "fill_", "log_normal_", "normal_", "random_", "uniform_", "zero_")
"""Operations that write all of their first argument and do not read it."""

_COPY = _all("clone", "_to_copy")
"""Operations that copy their first argument, perhaps into another dtype, and do nothing more."""

_DRAW = _all("exponential_", "log_normal_", "normal_", "random_", "uniform_", "rand", "randn", "randint", "randperm")
"""Operations that draw each number of their result alike, whatever stood there before."""


class NotNotableError(RuntimeError):
    """Something was done while a module was built that cannot be repeated later."""


@dataclass(frozen=True)
class NotedTensor:
    """A tensor that has no memory yet.

    Attributes:
        memory: number of the memory that it will lie in.
        dtype: of its numbers.
        shape: as `torch.Tensor.shape`.
        strides: as `torch.Tensor.stride`.
        offset: as `torch.Tensor.storage_offset`.
        fills_memory: nothing else lies in its memory.
    """

    memory: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    fills_memory: bool

    def within(self, memory: torch.UntypedStorage) -> Tensor:
        """The tensor, once its memory is there."""
        blank = torch.empty(0, dtype=self.dtype, device=memory.device)
        with torch.no_grad():
            return blank.set_(memory, self.offset, self.shape, self.strides)  # type: ignore[call-overload,no-any-return]


@dataclass(frozen=True)
class _Note:
    """One operation.

    Attributes:
        function: of torch's dispatcher.
        leaves: its arguments, flat, with a `NotedTensor` for every tensor that has no memory yet.
        tree: how the arguments are nested.
        results: the tensors that it returns.
        device: of new ones.
    """

    function: Any
    leaves: tuple[Any, ...]
    tree: Any
    results: tuple[NotedTensor, ...]
    device: torch.device

    @property
    def given(self) -> list[NotedTensor]:
        return [leaf for leaf in self.leaves if isinstance(leaf, NotedTensor)]

    @property
    def written(self) -> set[int]:
        args, kwargs = tree_unflatten(self.leaves, self.tree)
        return {one.memory for one in (*self.results, *written_arguments(self.function, args, kwargs))}

    @property
    def read(self) -> set[int]:
        first = self.leaves[0] if self.leaves else None
        overwrites = isinstance(first, NotedTensor) and first.fills_memory and self.packet in _OVERWRITE
        return {one.memory for one in (self.given[1:] if overwrites else self.given)}

    @property
    def packet(self) -> Any:
        return self.function.overloadpacket

    @property
    def draws(self) -> bool:
        return draws(self.function)

    @property
    def can_be_left_out(self) -> bool:
        """Others draw the same numbers if it is not run but only draws; see `draw`."""
        return not self.draws or self.packet in _DRAW

    def run(self, tensor: Callable[[NotedTensor], Tensor]) -> list[Tensor]:
        """Runs the operation and returns the tensors that it gives."""
        leaves = [tensor(leaf) if isinstance(leaf, NotedTensor) else leaf for leaf in self.leaves]
        args, kwargs = tree_unflatten(leaves, self.tree)
        return tensors_in(self.function(*args, **kwargs))

    def run_into(self, here: dict[int, torch.UntypedStorage], tensor: Callable[[NotedTensor], Tensor]) -> None:
        """Runs the operation and keeps the memories that are new, each by its number."""
        for noted, made in zip(self.results, self.run(tensor), strict=True):
            here.setdefault(noted.memory, made.untyped_storage())

    def as_in_its_copy(self, view: NotedTensor) -> Tensor | None:
        """What this operation copies, seen as a view of the copy sees that; None where the two lie otherwise."""
        (copy,), given = self.results, self.leaves[0]
        if not isinstance(given, Tensor) or not copy.fills_memory or given.stride() != copy.strides:
            return None
        return given.as_strided(view.shape, view.strides, given.storage_offset() + view.offset)

    def draw(self) -> None:
        """Draws for nobody."""
        (result,) = self.results
        blank = torch.empty_strided(result.shape, result.strides, dtype=result.dtype, device=self.device)
        self.run(lambda _: blank)


class BuildingLog:
    """The operations that make the weights of a module.

    Args:
        device: where weights are drawn whose maker names no other device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._notes: list[_Note] = []
        self._memories: list[tuple[torch.UntypedStorage, torch.device]] = []
        self._numbers: dict[int, int] = {}  # id of a memory without bytes -> its number
        self._used: list[tuple[Tensor, int]] = []  # tensors that are there, and their version when they were used

    def noted(self, tensor: Tensor) -> NotedTensor | None:
        """Finds a tensor without memory in the log; None for one that is there."""
        if tensor.device != META:
            return None
        storage = tensor.untyped_storage()
        number = self._numbers.get(id(storage))
        if number is None:
            return None
        shape, strides, offset = tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())
        extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        fills = offset == 0 and extent == math.prod(shape) and extent * tensor.itemsize == storage.nbytes()
        return NotedTensor(number, tensor.dtype, shape, strides, offset, fills)

    def device_of(self, noted: NotedTensor) -> torch.device:
        """The device on which a tensor will lie."""
        return self._memories[noted.memory][1]

    def add(self, function: Any, leaves: list[Any], tree: Any, results: list[Tensor], device: torch.device) -> None:
        """Notes an operation, if it does more than to look at memory in another way."""
        known = [leaf.memory for leaf in leaves if isinstance(leaf, NotedTensor)]
        for result in results:
            storage = result.untyped_storage()
            if id(storage) not in self._numbers:
                self._numbers[id(storage)] = len(self._memories)
                self._memories.append((storage, device))
        noted = tuple(one for one in map(self.noted, results) if one is not None)
        if not is_mutable(function) and {one.memory for one in noted} <= set(known):
            return
        self._used += [(leaf, leaf._version) for leaf in leaves if isinstance(leaf, Tensor)]
        self._notes.append(_Note(function, tuple(leaves), tree, noted, device))

    def source(self, wanted: NotedTensor) -> Tensor | None:
        """The tensor of which this one is a copy and nothing more, perhaps in another dtype, or turned; else None.

        Who wants a part only can take it from there.
        """
        copy = self._copy_into(wanted.memory) if wanted.fills_memory else None
        given = None if copy is None else copy.leaves[0]
        if isinstance(given, NotedTensor):  # was read, then turned
            first = self._copy_into(given.memory) if given.dtype == wanted.dtype else None
            given = None if first is None else first.as_in_its_copy(given)
        return given if isinstance(given, Tensor) and tuple(given.shape) == wanted.shape else None

    def _copy_into(self, memory: int) -> _Note | None:
        """The operation that copies what a memory holds; None where it holds anything else."""
        notes = [note for note in self._notes if memory in note.written]
        return notes[0] if len(notes) == 1 and notes[0].packet in _COPY else None

    def make(
        self,
        wanted: Iterable[NotedTensor],
        take: Callable[[int, torch.UntypedStorage], None],
        as_built_whole: bool = True,
    ) -> None:
        """Makes tensors, with random numbers of the stream in which torch is.

        Args:
            wanted: which ones.
            take: is called with the number of every memory that they lie in and the memory itself, as soon as it is
                final. It is not kept afterwards.
            as_built_whole: numbers are drawn for what is not wanted too, so that the wanted ones are the same as in a
                process that makes all.

        Raises:
            NotNotableError: a tensor from outside was changed after it had been used.
        """
        if any(tensor._version != version for tensor, version in self._used):
            raise NotNotableError("a tensor that had been copied into a weight was changed afterwards")
        finals = {one.memory for one in wanted}
        needed, last_use = self._needed(finals)
        last_draw = max((number for number in needed if self._notes[number].draws), default=-1)
        here: dict[int, torch.UntypedStorage] = {}

        def tensor(one: NotedTensor) -> Tensor:
            if one.memory not in here:
                here[one.memory] = self._blank(one.memory)
            return one.within(here[one.memory])

        for number, note in enumerate(self._notes):
            if number in needed:
                note.run_into(here, tensor)
                for memory in [memory for memory in here if last_use[memory] == number]:
                    if memory in finals:
                        finals.remove(memory)
                        take(memory, here.pop(memory))
                    else:
                        del here[memory]
            elif as_built_whole and note.draws and number < last_draw:
                note.draw()
        for memory in finals:  # which nobody has written
            take(memory, self._blank(memory))

    def _needed(self, finals: set[int]) -> tuple[set[int], dict[int, int]]:
        """The notes without which memories cannot be made, and for each memory the last of these that touches it."""
        wanted, needed, last_use = set(finals), set[int](), dict[int, int]()
        for number in range(len(self._notes) - 1, -1, -1):
            note = self._notes[number]
            if note.packet in _EMPTY or (note.can_be_left_out and not note.written & wanted):
                continue
            needed.add(number)
            for memory in note.written | {one.memory for one in note.given}:
                last_use.setdefault(memory, number)
            wanted = (wanted - note.written) | note.read
        return needed, last_use

    def _blank(self, memory: int) -> torch.UntypedStorage:
        storage, device = self._memories[memory]
        return torch.UntypedStorage(storage.nbytes(), device=device)  # type: ignore[no-untyped-call]


@torch.library.custom_op("flowtrain::trunc_normal_", mutates_args=("tensor",))
def trunc_normal(tensor: Tensor, mean: float, std: float, a: float, b: float) -> None:
    """`torch.nn.init.trunc_normal_` as one operation: how much it draws depends on what it has drawn."""
    nn.init.trunc_normal_(tensor, mean, std, a, b)


@trunc_normal.register_fake
def _(tensor: Tensor, mean: float, std: float, a: float, b: float) -> None:
    pass


def tensors_in(values: Any) -> list[Any]:
    """Tensors in nested arguments or results, those that are noted too."""
    return [value for value in tree_flatten(values)[0] if isinstance(value, Tensor | NotedTensor)]


def draws(func: Any) -> bool:
    """Whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags or func is torch.ops.flowtrain.trunc_normal_.default


# What an operation takes and writes is public in its schema, but the schema itself has no public name.


def arguments_of(func: Any) -> set[str]:
    """The names of an operation's arguments."""
    return {argument.name for argument in func._schema.arguments}


def is_mutable(func: Any) -> bool:
    """Whether an operation writes one of its arguments."""
    return bool(func._schema.is_mutable)


def written_arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The tensors among the arguments that an operation writes."""
    found: list[Any] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += tensors_in(args[index] if index < len(args) else kwargs.get(argument.name))
    return found
