"""How an entry lies in memory: a checked header that describes a tuple of tensors, then their bytes.

::

    0    magic, checksum of the header
    8    address, key, bytes of the whole entry
    32   channel, number of tensors
    40   where in device memory it lies, if it does
    64   per tensor 80 bytes: dtype, dimensions, offset, shape
    ...  the tensors, each at a multiple of the alignment

In device memory an entry lies in the same way, but that its header stays in host memory.
"""

from __future__ import annotations

import ctypes
import math
import struct
import zlib
from collections.abc import Callable, Sequence
from mmap import mmap
from typing import NamedTuple

import torch
from torch import Tensor

from flowtrain_lightning.pool.address import Address, aligned
from flowtrain_lightning.pool.errors import PoolError

Memory = mmap | bytearray
"""Writable bytes that tensors can be views of."""

MAX_TENSORS = 16
MAX_DIMENSIONS = 8

_MAGIC = 0x464C4F57
_UNCHECKED = struct.Struct("<II")
_CHECKED = struct.Struct("<QQQIIQI12x")  # with the descriptions of the tensors, which follow
_HEAD = struct.Struct("<IIQQQIIQI12x")
HEAD_BYTES = _HEAD.size
"""What every entry begins with, at least: the part of its header that says which one it is."""

_TENSOR = struct.Struct("<BB6xQ8Q")
_CHECKED_FROM = _UNCHECKED.size
_LONGEST_HEADER = _HEAD.size + MAX_TENSORS * _TENSOR.size
_PADDING = tuple((0,) * (MAX_DIMENSIONS - dimensions) for dimensions in range(MAX_DIMENSIONS + 1))
_HEADER_BYTES = tuple(aligned(_HEAD.size + count * _TENSOR.size) for count in range(MAX_TENSORS + 1))
_SMALL_BYTES = 64 * 1024  # what is larger is copied by several threads, where torch has them
_Place = ctypes.c_char * 1  # as a pointer into memory
_ERASED = bytes(_CHECKED_FROM)
_OUTSIDE = "The header of an entry describes a tensor that lies outside of it."

# The position is the code that stands in the header: append only.
_DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class Key(NamedTuple):
    """The name of an entry, given by those who use the pool and never given twice.

    Attributes:
        channel: 0 .. 255, what kind of entry it is.
        index: 0 .. 2**40 - 1, never falls within a channel: for example the step.
        item: 0 .. 2**24 - 1, which of its kind and index.
    """

    channel: int
    index: int  # type: ignore[assignment]  # the name hides a tuple's method, which no one needs of a key
    item: int

    def pack(self) -> int:
        """Index and item as one number of 64 bits; the channel stands beside it.

        Raises:
            PoolError: when a part lies outside of its bits.
        """
        channel, index, item = self
        if not (0 <= channel < 256 and 0 <= index < 1 << 40 and 0 <= item < 1 << 24):
            raise PoolError(f"{self} is no key: expected channel < 256, index < 2**40, item < 2**24, none negative.")
        return index << 24 | item

    @classmethod
    def unpack(cls, channel: int, number: int) -> Key:
        """The key behind a channel and a number made by ``pack``."""
        return cls(channel, number >> 24, number & 0xFFFFFF)


class Body(NamedTuple):
    """Where the tensors of an entry lie when they are in device memory.

    Attributes:
        offset: of the entry in its owner's block, in bytes.
        slot: its place among those that live in that block.
    """

    offset: int
    slot: int


_IN_HOST_MEMORY = Body(0, 0)

DeviceView = Callable[[int, torch.dtype, Sequence[int]], Tensor]
"""Looks at a tensor of an entry in device memory: where it begins, from the entry's start on, its dtype and shape."""


def header_bytes(tensors: int) -> int:
    """Bytes from the start of an entry of so many tensors to the first of them."""
    return _HEADER_BYTES[tensors]


def entry_room(nbytes: Sequence[int]) -> int:
    """Room that an entry takes, header and alignment included, given the bytes of each tensor of the tuple."""
    return aligned(_HEAD.size + len(nbytes) * _TENSOR.size) + sum(map(aligned, nbytes))


def entry_bytes(tensors: Sequence[Tensor]) -> int:
    """Room that an entry of ``tensors`` takes.

    Raises:
        PoolError: when the tuple is one that no header can describe.
    """
    if len(tensors) > MAX_TENSORS:
        raise PoolError(f"An entry of {len(tensors)} tensors was given; it can hold {MAX_TENSORS} at most.")
    total = _HEADER_BYTES[len(tensors)]
    for tensor in tensors:
        if tensor.dim() > MAX_DIMENSIONS or tensor.dtype not in _CODES:
            raise PoolError(
                f"A tensor of shape {tuple(tensor.shape)} and {tensor.dtype} cannot pass through the pool: expected "
                f"at most {MAX_DIMENSIONS} dimensions and one of {', '.join(str(d)[6:] for d in _DTYPES)}."
            )
        total += aligned(tensor.nbytes)
    return total


def write_entry(
    memory: Memory, address: Address, key: Key, tensors: Sequence[Tensor], body: Body = _IN_HOST_MEMORY
) -> None:
    """Copy ``tensors`` to ``address``; the header comes last, so that a half-written entry is never a valid one.

    With a ``body`` in device memory only the header is written: the tensors will be there for all who read them.
    """
    base = address.offset
    position = _HEADER_BYTES[len(tensors)]
    descriptions = b""
    for tensor in tensors:
        shape = tensor.shape
        descriptions += _TENSOR.pack(_CODES[tensor.dtype], len(shape), position, *shape, *_PADDING[len(shape)])
        nbytes = tensor.nbytes
        if body is _IN_HOST_MEMORY and not _copy_plainly(memory, base + position, tensor, nbytes):
            view = _view(memory, base + position, tensor.dtype, shape, tensor.numel())
            view.copy_(tensor.detach() if tensor.requires_grad else tensor)
        position += aligned(nbytes)
    head = _CHECKED.pack(address, key.pack(), position, key.channel, len(tensors), *body) + descriptions
    memory[base : base + _CHECKED_FROM + len(head)] = _UNCHECKED.pack(_MAGIC, zlib.crc32(head)) + head


def erase_entry(memory: Memory, offset: int) -> None:
    """Make whoever still holds the address of the entry at ``offset`` find none there."""
    memory[offset : offset + _CHECKED_FROM] = _ERASED


def read_entry(
    memory: Memory,
    start: int,
    nbytes: int,
    address: Address,
    key: Key,
    look: Callable[[Body], DeviceView] | None = None,
) -> tuple[Tensor, ...]:
    """The tensors of an entry, as views of its bytes.

    Args:
        memory: where the entry, or a copy of it, lies.
        start: its first byte; it and ``nbytes`` lie within ``memory``.
        nbytes: its size, as published.
        address: the address that was published.
        key: the key that was published.
        look: what looks at the tensors when they lie in device memory; told where as soon as that is known.

    Raises:
        PoolError: when the entry is gone, or its header damaged. Nothing of it is read then.
    """
    header = memory[start : start + min(nbytes, _LONGEST_HEADER)]  # a copy: what is checked is what is believed
    if len(header) < _HEAD.size:
        raise PoolError(f"{key} was published with {nbytes} bytes; an entry has {_HEAD.size} at least.")
    magic, checksum, owned, number, total, channel, count, body_offset, slot = _HEAD.unpack_from(header)
    if magic != _MAGIC or owned != address or channel != key.channel or number != key.pack():
        raise PoolError(f"{address} of {key} is stale: the entry was freed by its owner since it was published.")
    described = _HEAD.size + count * _TENSOR.size
    if (
        count > MAX_TENSORS
        or total != nbytes
        or described > nbytes
        or zlib.crc32(header[_CHECKED_FROM:described]) != checksum
    ):
        raise PoolError(f"The header of {key} at {address} is damaged: its checksum does not match.")
    in_device_memory = look(Body(body_offset, slot)) if look is not None else None
    tensors = []
    for place in range(_HEAD.size, described, _TENSOR.size):
        code, dimensions, position, *padded = _TENSOR.unpack_from(header, place)
        if code >= len(_DTYPES) or dimensions > MAX_DIMENSIONS:
            raise PoolError(_OUTSIDE)
        dtype, shape = _DTYPES[code], padded[:dimensions]
        elements = math.prod(shape)
        if position + elements * dtype.itemsize > nbytes:
            raise PoolError(_OUTSIDE)
        if in_device_memory is None:
            tensors.append(_view(memory, start + position, dtype, shape, elements))
        else:
            tensors.append(in_device_memory(position, dtype, shape))
    return tuple(tensors)


def _copy_plainly(memory: Memory, offset: int, tensor: Tensor, nbytes: int) -> bool:
    """Copy a small tensor as plain bytes, which saves two microseconds, where its bytes are what it is."""
    if (
        not 0 < nbytes <= _SMALL_BYTES
        or type(tensor) is not Tensor
        or not tensor.is_cpu
        or tensor.layout is not torch.strided
        or not tensor.is_contiguous()
        or tensor.is_conj()
        or tensor.is_neg()
    ):
        return False
    source = tensor.data_ptr()
    if source:
        ctypes.memmove(_Place.from_buffer(memory, offset), source, nbytes)
    return source != 0


def _view(memory: Memory, offset: int, dtype: torch.dtype, shape: Sequence[int], elements: int) -> Tensor:
    # Each view has a storage of its own: were they views of one tensor, an in-place write to any of them would count
    # as a change of all, and autograd would refuse a backward through features whose neighbour was written.
    if elements == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    flat = torch.frombuffer(memory, dtype=dtype, count=elements, offset=offset)
    return flat if len(shape) == 1 else flat.view(shape)
