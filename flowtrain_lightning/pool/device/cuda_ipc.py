"""CUDA IPC: a GPU as the device tier needs it, its memory by the CUDA driver, events and streams by PyTorch.

PyTorch's own allocator is not asked for the block: under ``expandable_segments`` its memory cannot be shared.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from mmap import mmap
from typing import Any
from uuid import UUID

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
        self.card = _card(self._device)
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
            memory = _tensor_at(pointer.value, nbytes, self._device)
        return DeviceBlock(memory, bytes(handle), self._calling(self._device, "cuMemFree_v2", pointer))

    def open_block(self, card: bytes, handle: bytes, nbytes: int) -> DeviceBlock:
        """``cuIpcOpenMemHandle``, in the context of the card on which the memory lies."""
        device = _device_of(card)
        with _Context(device):
            pointer, opened = ctypes.c_uint64(), _IpcHandle.from_buffer_copy(handle)
            self._driver.call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), opened, _ENABLE_PEER_ACCESS)
            size = ctypes.c_size_t()
            self._driver.call("cuMemGetAddressRange_v2", None, ctypes.byref(size), pointer)
            if size.value < nbytes:
                raise PoolError(f"its owner tells of {nbytes:,} bytes, but there are {size.value:,}")
            memory = _tensor_at(pointer.value, nbytes, device)
        return DeviceBlock(memory, handle, self._calling(device, "cuIpcCloseMemHandle", pointer))

    def make_event(self) -> DeviceEvent:
        """An interprocess event, made at once."""
        event: DeviceEvent = torch.cuda.Event(interprocess=True)  # type: ignore[no-untyped-call]
        event.record(self.side)  # which is when PyTorch makes it, on the device of that stream
        return event

    def open_event(self, card: bytes, handle: bytes) -> DeviceEvent:
        """``cudaIpcOpenEventHandle``."""
        event: DeviceEvent = torch.cuda.Event.from_ipc_handle(_device_of(card), handle)  # type: ignore[no-untyped-call]
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
        return self._calling(self._device, "cuMemHostUnregister", pointer)

    def synchronize(self) -> None:
        """``cudaDeviceSynchronize``."""
        torch.cuda.synchronize(self._device)

    def _calling(
        self, device: torch.device, function: str, pointer: ctypes.c_uint64 | ctypes.c_void_p
    ) -> Callable[[], None]:
        def call() -> None:
            with _Context(device):
                self._driver.call(function, pointer)

        return call


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


def _tensor_at(pointer: int, nbytes: int, device: torch.device) -> Tensor:
    """A tensor over memory that PyTorch does not own, by the public array interface."""

    class Memory:
        __cuda_array_interface__ = {  # noqa: RUF012  # as the interface wants it
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "version": 2,
        }

    tensor = torch.as_tensor(Memory(), device=device)
    if tensor.data_ptr() != pointer:
        raise PoolError(f"PyTorch made a copy of device memory on {device} where it was asked to look at it.")
    return tensor


def _card(device: torch.device) -> bytes:
    return UUID(str(torch.cuda.get_device_properties(device).uuid)).bytes


def _device_of(card: bytes) -> torch.device:
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        if _card(device) == card:
            return device
    raise PoolError("this process does not see the peer's GPU; is CUDA_VISIBLE_DEVICES different on each rank?")
