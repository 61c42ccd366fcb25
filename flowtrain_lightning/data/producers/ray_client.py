"""A process that asks Ray's producers for the steps of a rank, so that the rank has neither Ray's threads nor its end.

Run as a script of its own by `producers.py`: it imports nothing of this package, and hands on the bytes of steps. It
ends with the socket that ties it to its rank.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

MEMORY = b"memory"
"""Goes with a descriptor."""


class Producer:
    """Makes steps of one rank; an actor, which Ray starts anew where it dies."""

    def __init__(self) -> None:
        self._maker: Any = None

    def produce(self, origin: list[Any], key: bytes) -> tuple[bytes, int, Sequence[int], Sequence[Any]]:
        """A step.

        Args:
            origin: a reference to the bytes from which it knows the rank's steps. In a list, as Ray would send along
                with each call what it refers to.
            key: of the step.

        Returns:
            what the rank alone understands, the bytes of its tensors together, where each begins, and the tensors.
        """
        import ray

        from flowtrain_lightning.data.producers.step_maker import StepMaker

        if self._maker is None:
            self._maker = StepMaker(ray.get(origin[0]))
        made: tuple[bytes, int, Sequence[int], Sequence[Any]] = self._maker.make(key)
        return made


class Producers:
    """Producers of one rank, and the steps that they make.

    Args:
        address: of Ray.
        connecting: further settings of ``ray.init``.
        count: of producers.
        actor: settings of each, as Ray knows them.
        origin: from which they know the rank's steps.
    """

    def __init__(
        self, address: str, connecting: dict[str, Any], count: int, actor: dict[str, Any], origin: bytes
    ) -> None:
        import ray

        self._ray = ray
        ray.init(address, log_to_driver=False, configure_logging=False, **connecting)
        self._origin = [ray.put(origin)]
        kind = ray.remote(Producer).options(**actor)
        self._producers = [kind.remote() for _ in range(count)]
        self._making: deque[tuple[int, Any]] = deque()

    def forget(self) -> None:
        """Whatever was begun is not asked for any more."""
        self._making.clear()

    def begin(self, key: bytes) -> None:
        """Give a step to the producer that has the fewest left."""
        begun = [reference for _, reference in self._making]
        made = set(self._ray.wait(begun, num_returns=len(begun), timeout=0)[0]) if begun else set()
        left = [0] * len(self._producers)
        for producer, reference in self._making:
            left[producer] += reference not in made
        producer = left.index(min(left))
        self._making.append((producer, self._producers[producer].produce.remote(self._origin, key)))

    def next(self) -> tuple[bytes, int, Sequence[int], Sequence[Any]]:
        """The step that was begun first."""
        _, reference = self._making.popleft()
        made: tuple[bytes, int, Sequence[int], Sequence[Any]] = self._ray.get(reference)
        return made


def main() -> None:
    """Answer the rank until it lets go of its end of the socket."""
    os.dup2(2, 1)  # whatever Ray prints
    link = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_end_with, args=(link.fileno(),), daemon=True).start()
    connection = Connection(os.dup(link.fileno()))
    try:
        producers = Producers(**pickle.loads(connection.recv_bytes()))
    except Exception as error:  # Ray raises what its parts raise: it is told in the rank, whatever it is
        connection.send(("unconnected", f"{type(error).__name__}: {error}"))
        return
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # sent to all processes of a job before its end: ranks still read
    while True:
        anew, keys = connection.recv()
        if anew:
            producers.forget()
        for key in keys:
            producers.begin(key)
        try:
            told, nbytes, offsets, tensors = producers.next()
        except producers._ray.exceptions.RayError as error:
            connection.send(("lost", str(error)))
            continue
        connection.send(("made", told, nbytes))
        if nbytes:
            _hand_over(link, nbytes, offsets, tensors)
        del tensors  # which lie in Ray's memory


def _hand_over(link: socket.socket, nbytes: int, offsets: Sequence[int], tensors: Sequence[Any]) -> None:
    """Send tensors side by side in memory without a name."""
    descriptor = os.memfd_create("flowtrain step", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, nbytes)
        for offset, tensor in zip(offsets, tensors, strict=True):
            left = memoryview(tensor)
            while left:
                written = os.pwrite(descriptor, left, offset)
                left, offset = left[written:], offset + written
        socket.send_fds(link, [MEMORY], [descriptor])
    finally:
        os.close(descriptor)


def _end_with(link: int) -> None:
    ended = select.poll()
    ended.register(link, select.POLLRDHUP)
    ended.poll()
    os._exit(0)


if __name__ == "__main__":
    main()
