"""Carries the memory of a step from a worker to its rank: a descriptor through a socket that both have from the fork.

PyTorch's own way listens at a socket in the folder of temporary files, where it stays when the worker is killed, and
takes the memory from ``/dev/shm``, which is small in many containers.
"""

from __future__ import annotations

import itertools
import mmap
import os
import socket
import struct
import weakref
from contextlib import suppress

import torch
from torch import Tensor

_TOKEN = struct.Struct("<Q")
_numbers = itertools.count()


class WorkerChannel:
    """Of one worker, made before it is forked. What it sends arrives in order, and waits in the socket.

    Attributes:
        number: names the channel in both processes.
    """

    def __init__(self) -> None:
        self.number = next(_numbers)
        self._sending, self._receiving = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._tokens = itertools.count()
        _channels[self.number] = self

    def __del__(self) -> None:
        with suppress(AttributeError):  # when no socket could be had
            self._sending.close()
            self._receiving.close()

    def send(self, block: Tensor) -> int:
        """Called by the worker.

        Args:
            block: ``[bytes]`` uint8, at least one.

        Returns:
            what `receive` is told.
        """
        token = next(self._tokens)
        descriptor = os.memfd_create("flowtrain step", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, block.numel())
            _map(descriptor, block.numel()).copy_(block)
            socket.send_fds(self._sending, [_TOKEN.pack(token)], [descriptor])
        finally:
            os.close(descriptor)
        return token

    def receive(self, token: int, nbytes: int) -> Tensor:
        """Called by the rank: the block of that token, as it lies in the worker's memory."""
        while True:
            message, descriptors, _, _ = socket.recv_fds(self._receiving, _TOKEN.size, 1)
            try:
                if _TOKEN.unpack(message)[0] == token:  # a former one was not asked for
                    return _map(descriptors[0], nbytes)
            finally:
                os.close(descriptors[0])


_channels: weakref.WeakValueDictionary[int, WorkerChannel] = weakref.WeakValueDictionary()


def channel(number: int) -> WorkerChannel:
    """The channel of that number."""
    return _channels[number]


def _map(descriptor: int, nbytes: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(descriptor, nbytes), dtype=torch.uint8)
