"""An entry: its key, and how its tensors lie in memory behind a checked header.

::

    0    checksum of the rest of the header (4 bytes), its length (2), number of tensors (1), channel of the key (1)
    8    address
    16   key without its channel
    24   offset (8) and slot (4) of the tensors in the owner's device memory, if they lie there
    40   per tensor: dtype (1), number of dimensions (1), and from the next multiple of 8 on the shape (8 each)
    ...  the tensors, each at the next multiple of the alignment

In device memory tensors lie at the same distances from each other; their header stays in host memory.
"""

from __future__ import annotations

import ctypes
import math
import struct
import sys
import zlib
from collections.abc import Sequence
from mmap import mmap
from typing import NamedTuple

import torch
from torch import Tensor

from flowtrain_lightning.pool.address import Address, aligned
from flowtrain_lightning.pool.control_records import ControlRecord
from flowtrain_lightning.pool.pool_errors import PoolError

Memory = mmap | bytearray
"""Writable bytes that tensors can be views of."""

MAX_TENSORS = 16
MAX_DIMENSIONS = 8

_INDICES, _ITEMS, _PARTS = 1 << 32, 1 << 24, 1 << 8  # how many of each a key tells apart

_CHECKSUM = struct.Struct("<I")
_CHECKED = struct.Struct("<HBBQQQI4x")  # the rest of what every header begins with; descriptions of tensors follow
_HEAD = struct.Struct("<IHBBQQQI4x")
_ADDRESS = slice(8, 16)
_TENSORS = [struct.Struct(f"<BB6x{dimensions}Q") for dimensions in range(MAX_DIMENSIONS + 1)]
_SHAPES = [struct.Struct(f"<{dimensions}Q") for dimensions in range(MAX_DIMENSIONS + 1)]
_TENSOR_BYTES = _TENSORS[MAX_DIMENSIONS].size  # kept free for each, since sizes are reckoned without shapes
_LONGEST_HEADER = _HEAD.size + MAX_TENSORS * _TENSOR_BYTES
_HEADER_BYTES = [aligned(_HEAD.size + count * _TENSOR_BYTES) for count in range(MAX_TENSORS + 1)]
_SMALL_BYTES = 64 * 1024
_new = tuple.__new__  # half the time of a call of the class, where it is made for every entry

# The position is the code that stands in the header.
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
_SIZES = [dtype.itemsize for dtype in _DTYPES]


class Key(NamedTuple):
    """The name of an entry, given by those who use the pool and never given twice.

    Attributes:
        channel: 0 .. 255, what kind of entry it is.
        index: 0 .. 2**32 - 1, never falls within a channel: for example the step.
        item: 0 .. 2**24 - 1, which of its kind and index.
        part: 0 .. 255, which part of it, where several ranks put one each: readers of one entry, say, of which each
            gives back the gradients of the rows that it has used.
    """

    channel: int
    index: int  # type: ignore[assignment]  # the name hides a tuple's method, which no one needs of a key
    item: int
    part: int = 0

    def pack(self) -> int:
        """Index, item and part as one number of 64 bits, which records and headers carry beside the channel.

        Raises:
            PoolError: when one of them lies outside of its bits.
        """
        channel, index, item, part = self
        if not (0 <= channel < 256 and 0 <= index < _INDICES and 0 <= item < _ITEMS and 0 <= part < _PARTS):
            raise PoolError(
                f"{self} is no key: expected channel < 256, index < 2**32, item < 2**24, part < 256, none negative."
            )
        return index << 32 | item << 8 | part

    @classmethod
    def unpack(cls, channel: int, number: int) -> Key:
        """The key behind a channel and a number made by ``pack``."""
        return _new(cls, (channel, number >> 32, number >> 8 & _ITEMS - 1, number & _PARTS - 1))


class EntryLayout(NamedTuple):
    """The layout of a tuple of tensors in an entry.

    Attributes:
        nbytes: size of the entry, header and alignment included.
        descriptions: of the tensors, as the header has them.
        offsets: where each tensor begins, in bytes from the entry's start.
    """

    nbytes: int
    descriptions: bytes
    offsets: list[int]


class DeviceLocation(NamedTuple):
    """The places of an entry's tensors in device memory.

    Attributes:
        offset: in the owner's block, in bytes.
        slot: number of the events that say when the tensors are there, and when readers have done with them.
    """

    offset: int
    slot: int


_IN_HOST_MEMORY = DeviceLocation(0, 0)

StoredTensor = tuple[int, torch.dtype, tuple[int, ...], int]
"""A tensor of an entry: where it begins, in bytes from the entry's start; its dtype, shape and number of elements."""


def entry_nbytes(nbytes: Sequence[int]) -> int:
    """Bytes that an entry takes, header and alignment included, given the bytes of each tensor of the tuple."""
    total = _HEAD.size + len(nbytes) * _TENSOR_BYTES + 63 & -64
    for each in nbytes:
        total += each + 63 & -64  # as `aligned`, without a call for each
    return total


def lay_out_tensors(tensors: Sequence[Tensor]) -> EntryLayout:
    """The layout of an entry of ``tensors``.

    Raises:
        PoolError: when no header can describe them.
    """
    if len(tensors) > MAX_TENSORS:
        raise PoolError(f"An entry of {len(tensors)} tensors was given; it can hold {MAX_TENSORS} at most.")
    end, descriptions, offsets = _HEADER_BYTES[len(tensors)], b"", []
    for tensor in tensors:
        shape, code = tensor.shape, _CODES.get(tensor.dtype)
        dimensions = len(shape)
        if code is None or dimensions > MAX_DIMENSIONS:
            raise PoolError(
                f"A tensor of shape {tuple(shape)} and {tensor.dtype} cannot pass through the pool: expected "
                f"at most {MAX_DIMENSIONS} dimensions and one of {', '.join(str(d)[6:] for d in _DTYPES)}."
            )
        descriptions += _TENSORS[dimensions].pack(code, dimensions, *shape)
        offsets.append(end)
        end += tensor.nbytes + 63 & -64
    return _new(EntryLayout, (end, descriptions, offsets))


def write_tensors(memory: Memory, first_byte: int, start: int, tensors: Sequence[Tensor], layout: EntryLayout) -> None:
    """Copy ``tensors`` into the entry that begins at ``start``.

    Args:
        memory: holds the entry.
        first_byte: where this process has ``memory``.
        start: of the entry, in ``memory``.
        tensors: on any device, contiguous or not.
        layout: of these tensors.
    """
    # The C library's copy is the faster one, by a tenth to a third; but torch has several threads for large tensors.
    longest = _SMALL_BYTES if torch.get_num_threads() > 1 else sys.maxsize
    for tensor, offset in zip(tensors, layout.offsets, strict=True):
        nbytes = tensor.nbytes
        if 0 < nbytes <= longest and _is_plain(tensor):
            ctypes.memmove(first_byte + start + offset, tensor.data_ptr(), nbytes)
        else:
            target_of(memory, start + offset, tensor).copy_(tensor.detach() if tensor.requires_grad else tensor)


def target_of(memory: Memory, start: int, tensor: Tensor) -> Tensor:
    """The bytes from ``start`` on as a tensor of the same type and shape as the given one."""
    return view_tensor(memory, start, (0, tensor.dtype, tensor.shape, tensor.numel()))


def write_header(
    memory: Memory,
    start: int,
    published: ControlRecord,
    layout: EntryLayout,
    location: DeviceLocation = _IN_HOST_MEMORY,
) -> None:
    """Say what the entry that begins at ``start`` holds. It comes last: a half-written entry is never a valid one.

    Args:
        memory: holds the entry, or its header alone.
        start: of the entry, in ``memory``.
        published: the record that will publish it.
        layout: of its tensors.
        location: where they are, or will be for all who read them, if that is device memory.
    """
    _, descriptions, offsets = layout
    length = _HEAD.size + len(descriptions)
    identity = published.channel, published.address, published.number
    head = _CHECKED.pack(length, len(offsets), *identity, *location) + descriptions
    memory[start : start + length] = _CHECKSUM.pack(zlib.crc32(head)) + head


def erase_header(memory: Memory, start: int) -> None:
    """Make whoever still holds the address of the entry that begins at ``start`` find none there."""
    memory[start + _ADDRESS.start : start + _ADDRESS.stop] = bytes(8)


def read_header(memory: Memory, start: int, published: ControlRecord) -> tuple[list[StoredTensor], int, int]:
    """Reads an entry, and its offset and slot in the owner's device memory if its tensors lie there.

    Args:
        memory: where the entry, or a copy of it, lies.
        start: its first byte; it and the published size lie within ``memory``.
        published: the record that published it.

    Raises:
        PoolError: when the entry is gone, or its header damaged.
    """
    nbytes = published.size
    header = memory[start : start + min(nbytes, _LONGEST_HEADER)]  # a copy: what is checked is what is believed
    if len(header) < _HEAD.size:
        raise PoolError(f"{_name(published)} was published with {nbytes} bytes; an entry has {_HEAD.size} at least.")
    checksum, length, count, channel, address, number, offset, slot = _HEAD.unpack_from(header)
    if address != published.address or number != published.number or channel != published.channel:
        raise PoolError(f"{_name(published)} is stale: the entry was freed by its owner since it was published.")
    if zlib.crc32(header[_CHECKSUM.size : length]) != checksum or count > MAX_TENSORS:
        raise PoolError(f"The header of {_name(published)} is damaged: its checksum does not match.")
    stored, position, end = [], _HEAD.size, _HEADER_BYTES[count]
    try:
        for _ in range(count):
            code, dimensions = header[position], header[position + 1]
            dtype, shape = _DTYPES[code], _SHAPES[dimensions].unpack_from(header, position + 8)
            elements = math.prod(shape)
            stored.append((end, dtype, shape, elements))
            position += 8 + 8 * dimensions
            end += elements * _SIZES[code] + 63 & -64
    except (IndexError, struct.error):
        end = -1
    if end != nbytes or position != length:
        raise PoolError(f"The header of {_name(published)} describes tensors that are not as large as the entry.")
    return stored, offset, slot


def read_tensors(memory: Memory, start: int, published: ControlRecord) -> tuple[Tensor, ...]:
    """The tensors of an entry in host memory, as views of its bytes; see `read_header`."""
    stored, _, _ = read_header(memory, start, published)
    tensors: tuple[Tensor, ...] = ()
    for each in stored:
        tensors += (view_tensor(memory, start, each),)
    return tensors


def view_tensor(memory: Memory, start: int, stored: StoredTensor) -> Tensor:
    """A tensor of the entry that begins at ``start`` of ``memory``."""
    # Each has a storage of its own: were they views of one tensor, an in-place write to any of them would count as a
    # change of all, and autograd would refuse a backward through features whose neighbour was written.
    offset, dtype, shape, elements = stored
    if elements == 0:
        return torch.empty(shape, dtype=dtype)
    flat = torch.frombuffer(memory, dtype=dtype, count=elements, offset=start + offset)
    return flat if len(shape) == 1 else flat.resize_(shape)  # in place, for less than `view` makes a second tensor


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


def _name(published: ControlRecord) -> str:
    return f"{Key.unpack(published.channel, published.number)} at {Address(published.address)!r}"
