"""CUDA IPC: a GPU as the device tier needs it, its memory by the CUDA driver, events and streams by PyTorch.

PyTorch's own allocator is not asked for the block: under ``expandable_segments`` its memory cannot be shared.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from mmap import mmap
from typing import Any

import torch
from torch import Tensor

from flowtrain_lightning.pool.device.device_tier import HANDLE_BYTES, DeviceBlock, DeviceEvent
from flowtrain_lightning.pool.pool_errors import PoolError
from flowtrain_lightning.pool.shared_memory import first_byte_of

_GRANULE = 2 << 20  # smaller allocations lie beside others in memory that is shared as a whole
_ENABLE_PEER_ACCESS = ctypes.c_uint(1)  # the only flag of cuIpcOpenMemHandle, which it demands
_PORTABLE = ctypes.c_uint(1)  # of cuMemHostRegister: pinned for all devices


class CudaRuntime:
    """A GPU.

    Args:
        device: which one.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        self._driver = _Driver()
        self.name = str(self._device)
        self.side = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def current(self) -> torch.cuda.Stream:
        """PyTorch's current stream of this device."""
        return torch.cuda.current_stream(self._device)

    def holds(self, tensor: Tensor) -> bool:
        """Whether it is a plain tensor on this device."""
        return tensor.device == self._device and tensor.layout is torch.strided

    def to_device(self, tensor: Tensor) -> Tensor:
        """A copy on this device."""
        return tensor.to(self._device)

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy on the CPU."""
        return tensor.to(self._device).cpu()  # by the own device, whose current stream has waited for the owner's

    def allocate(self, nbytes: int) -> DeviceBlock:
        """``cuMemAlloc``."""
        nbytes = -(-nbytes // _GRANULE) * _GRANULE
        with _Context(self._device):
            pointer, handle = ctypes.c_uint64(), _IpcHandle()
            self._driver.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(nbytes))
            self._driver.call("cuIpcGetMemHandle", ctypes.byref(handle), pointer)
            memory = tensor_at(pointer.value, nbytes, self._device)
        return DeviceBlock(memory, bytes(handle), self._calling("cuMemFree_v2", pointer))

    def open_block(self, handle: bytes, nbytes: int) -> DeviceBlock:
        """``cuIpcOpenMemHandle``, in this rank's own context, whichever card the memory lies on.

        A context on the owner's card would take hundreds of megabytes of it for every reader, and could not be made
        where each rank sees its own card alone.
        """
        with _Context(self._device):
            pointer, opened = ctypes.c_uint64(), _IpcHandle.from_buffer_copy(handle)
            self._driver.call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), opened, _ENABLE_PEER_ACCESS)
            size = ctypes.c_size_t()
            self._driver.call("cuMemGetAddressRange_v2", None, ctypes.byref(size), pointer)
            if size.value < nbytes:
                raise PoolError(f"its owner tells of {nbytes:,} bytes, but there are {size.value:,}")
            memory = tensor_at(pointer.value, nbytes, self._device)
        return DeviceBlock(memory, handle, self._calling("cuIpcCloseMemHandle", pointer))

    def make_room(self) -> None:
        """PyTorch's allocator keeps what is freed, so that a card may look full to the driver."""
        torch.cuda.empty_cache()

    def make_mark(self) -> DeviceEvent:
        """A plain event."""
        event: DeviceEvent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        return event

    def make_event(self) -> DeviceEvent:
        """An interprocess event, made at once."""
        event: DeviceEvent = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
        event.record(self.side)  # which is when PyTorch makes it, on the device of that stream
        return event

    def open_event(self, handle: bytes) -> DeviceEvent:
        """``cudaIpcOpenEventHandle``, in the own context too."""
        event: DeviceEvent = torch.cuda.Event.from_ipc_handle(self._device, handle)  # type: ignore[no-untyped-call]
        return event

    def copy(self, target: Tensor, source: Tensor) -> None:
        """On the side stream; the allocator gives the source's memory to nobody until then."""
        with torch.cuda.stream(self.side):
            target.copy_(source, non_blocking=True)
        source.record_stream(self.side)

    def pin(self, memory: mmap) -> Callable[[], None]:
        """``cuMemHostRegister``. Where the system refuses it (it limits locked memory, say), copies are slower."""
        pointer = ctypes.c_void_p(first_byte_of(memory))
        try:
            with _Context(self._device):
                self._driver.call("cuMemHostRegister_v2", pointer, ctypes.c_size_t(len(memory)), _PORTABLE)
        except PoolError:
            return lambda: None
        return self._calling("cuMemHostUnregister", pointer)

    def synchronize(self) -> None:
        """``cudaDeviceSynchronize``."""
        torch.cuda.synchronize(self._device)

    def _calling(self, function: str, pointer: ctypes.c_uint64 | ctypes.c_void_p) -> Callable[[], None]:
        def call() -> None:
            with _Context(self._device):
                self._driver.call(function, pointer)

        return call


def runtime_of(device: torch.device) -> CudaRuntime | None:
    """The GPU on which a rank computes; None where it computes on its CPU."""
    return CudaRuntime(device) if device.type == "cuda" else None


class _IpcHandle(ctypes.Structure):
    """``CUipcMemHandle``, which is passed by value."""

    _fields_ = [("reserved", ctypes.c_char * HANDLE_BYTES)]


class _Driver:
    """The CUDA driver, which PyTorch has loaded. Unlike the runtime's, its errors stay with the call that failed."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def call(self, function: str, *arguments: Any) -> None:
        """Call a function.

        Raises:
            PoolError: with the driver's reason when it fails.
        """
        code = getattr(self._library, function)(*arguments)
        if code:
            reason = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(reason))
            raise PoolError(f"{function}: {(reason.value or b'unknown error').decode()} ({code})")


class _Context:
    """The driver's calls are about ``device`` within it."""

    def __init__(self, device: torch.device) -> None:
        self._guard = torch.cuda.device(device)

    def __enter__(self) -> None:
        self._guard.__enter__()  # type: ignore[no-untyped-call]
        torch.cuda.current_stream().query()  # a call of the runtime makes its context the driver's; waits for nothing

    def __exit__(self, *error: object) -> None:
        self._guard.__exit__(*error)  # type: ignore[no-untyped-call]


class _DLDevice(ctypes.Structure):
    _fields_ = [("kind", ctypes.c_int32), ("number", ctypes.c_int32)]


class _DLTensor(ctypes.Structure):
    """``DLTensor`` of the DLPack standard, version 0."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("dimensions", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _DLManagedTensor(ctypes.Structure):
    """``DLManagedTensor``. Its last field would free the memory; the pool does that."""

    _fields_ = [("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_CPU, _CUDA = 1, 2  # of ``DLDeviceType``
_UNSIGNED = 1  # of ``DLDataTypeCode``


def tensor_at(pointer: int, nbytes: int, device: torch.device) -> Tensor:
    """A tensor over memory that PyTorch does not own, ``(nbytes,)`` uint8, by DLPack.

    DLPack says on which device the tensor is. The array interface would ask the driver, which names the card on which
    the memory lies: another one where a reader has opened the block of a peer.

    Args:
        pointer: an address that ``device`` can reach.
        nbytes: how much lies there.
        device: whose kernels and copies use it; with its number if there are several.
    """
    shape = (ctypes.c_int64 * 1)(nbytes)
    kind = _CUDA if device.type == "cuda" else _CPU
    described = _DLTensor(pointer, _DLDevice(kind, device.index or 0), 1, _UNSIGNED, 8, 1, shape, None, 0)
    managed = _DLManagedTensor(described, None, None)
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype, new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    tensor: Tensor = torch.from_dlpack(new_capsule(ctypes.addressof(managed), b"dltensor", None))  # type: ignore[attr-defined]
    _kept_descriptions.append((managed, shape))  # PyTorch looks at them for as long as the tensor lives
    return tensor


_kept_descriptions: list[tuple[_DLManagedTensor, Any]] = []
"""Of blocks that were opened: a few hundred bytes each, a few blocks in a process."""
