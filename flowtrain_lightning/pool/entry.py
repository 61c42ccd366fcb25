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
import sys
import zlib
from collections.abc import Callable, Sequence
from mmap import mmap
from typing import NamedTuple

import torch
from torch import Tensor

from flowtrain_lightning.pool.address import Address, aligned
from flowtrain_lightning.pool.errors import PoolError
from flowtrain_lightning.pool.key import Key

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
_SMALL_BYTES = 64 * 1024
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


class Body(NamedTuple):
    """Where the tensors of an entry lie when they are in device memory.

    Attributes:
        offset: of the entry in its owner's block, in bytes.
        slot: its place among those that live in that block.
    """

    offset: int
    slot: int


_IN_HOST_MEMORY = Body(0, 0)


class Outline(NamedTuple):
    """How a tuple of tensors lies in an entry.

    Attributes:
        nbytes: room that the entry takes, header and alignment included.
        descriptions: of the tensors, as the header has them.
        places: where each tensor begins, in bytes from the entry's start on.
    """

    nbytes: int
    descriptions: bytes
    places: list[int]


DeviceView = Callable[[int, torch.dtype, Sequence[int]], Tensor]
"""Looks at a tensor of an entry in device memory: where it begins, from the entry's start on, its dtype and shape."""


def entry_nbytes(nbytes: Sequence[int]) -> int:
    """Room that an entry takes, header and alignment included, given the bytes of each tensor of the tuple."""
    return aligned(_HEAD.size + len(nbytes) * _TENSOR.size) + sum(map(aligned, nbytes))


def outline(tensors: Sequence[Tensor]) -> Outline:
    """How an entry of ``tensors`` will lie.

    Raises:
        PoolError: when the tuple is one that no header can describe.
    """
    if len(tensors) > MAX_TENSORS:
        raise PoolError(f"An entry of {len(tensors)} tensors was given; it can hold {MAX_TENSORS} at most.")
    position, descriptions, places = _HEADER_BYTES[len(tensors)], b"", []
    for tensor in tensors:
        shape, code = tensor.shape, _CODES.get(tensor.dtype)
        dimensions = len(shape)
        if code is None or dimensions > MAX_DIMENSIONS:
            raise PoolError(
                f"A tensor of shape {tuple(shape)} and {tensor.dtype} cannot pass through the pool: expected "
                f"at most {MAX_DIMENSIONS} dimensions and one of {', '.join(str(d)[6:] for d in _DTYPES)}."
            )
        descriptions += _TENSOR.pack(code, dimensions, position, *shape, *_PADDING[dimensions])
        places.append(position)
        position += aligned(tensor.nbytes)
    return Outline(position, descriptions, places)


def write_tensors(memory: Memory, first_byte: int, offset: int, tensors: Sequence[Tensor], lines: Outline) -> None:
    """Copy ``tensors`` into the entry at ``offset``.

    Args:
        memory: holds the entry.
        first_byte: where this process has ``memory``.
        offset: of the entry.
        tensors: on any device, contiguous or not.
        lines: their outline.
    """
    # The C library's copy is the faster one, by a tenth to a third; but torch has several threads for large tensors.
    longest = _SMALL_BYTES if torch.get_num_threads() > 1 else sys.maxsize
    for tensor, place in zip(tensors, lines.places, strict=True):
        nbytes = tensor.nbytes
        if 0 < nbytes <= longest and _is_plain(tensor):
            ctypes.memmove(first_byte + offset + place, tensor.data_ptr(), nbytes)
        else:
            view = _view(memory, offset + place, tensor.dtype, tensor.shape, tensor.numel())
            view.copy_(tensor.detach() if tensor.requires_grad else tensor)


def write_header(memory: Memory, address: Address, key: Key, lines: Outline, body: Body = _IN_HOST_MEMORY) -> None:
    """Say what the entry at ``address`` holds. It comes last: a half-written entry is never a valid one.

    Args:
        memory: holds the entry, or with a ``body`` only its header.
        address: of the entry.
        key: of the entry.
        lines: the outline of its tensors.
        body: where they are, or will be for all who read them, if that is device memory.
    """
    nbytes, descriptions, places = lines
    head = _CHECKED.pack(address, key.pack(), nbytes, key.channel, len(places), *body) + descriptions
    start = address.offset
    memory[start : start + _CHECKED_FROM + len(head)] = _UNCHECKED.pack(_MAGIC, zlib.crc32(head)) + head


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


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor's bytes, one after another, are what it is."""
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and tensor.data_ptr() != 0
    )


def _view(memory: Memory, offset: int, dtype: torch.dtype, shape: Sequence[int], elements: int) -> Tensor:
    # Each view has a storage of its own: were they views of one tensor, an in-place write to any of them would count
    # as a change of all, and autograd would refuse a backward through features whose neighbour was written.
    if elements == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    flat = torch.frombuffer(memory, dtype=dtype, count=elements, offset=offset)
    return flat if len(shape) == 1 else flat.view(shape)
