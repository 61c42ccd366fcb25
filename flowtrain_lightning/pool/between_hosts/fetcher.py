"""A thread that fetches entries out of the memory of their owners, so that no lane waits for the network.

Of each entry it reads the tensors first and the head of its header last. An owner who gives the room of an entry to
another one erases that head before anything else, so whatever comes with a valid head came whole.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable

from flowtrain_lightning.pool.between_hosts.agent import Agent
from flowtrain_lightning.pool.entry import HEAD_BYTES
from flowtrain_lightning.pool.errors import PoolError
from flowtrain_lightning.pool.record import Record

_AT_ONCE = 16  # transfers; what is asked for later begins when one of them has ended
_SHORTEST_SECONDS, _LONGEST_SECONDS = 50e-6, 2e-3  # between two looks at what is running
_PART = 8  # a look follows when this part of the time since the last progress has passed again
_LIVENESS_SECONDS = 3.0  # a transfer from a rank that dies fails at once; who died, and how, is known a little later


class Fetched(bytearray):
    """The payload of a record that the thread has added: empty when the entry is here, else why it is not."""


class Fetch:
    """An entry on its way.

    Args:
        record: tells of the entry.
        name: of its owner's agent.
        source: where it lies, in the owner's address space.
        target: where it will lie, in that of this process.
    """

    def __init__(self, record: Record, name: str, source: int, target: int) -> None:
        self.record = record
        self._name = name
        self._source = source
        self._target = target
        self._pieces = [(0, HEAD_BYTES)]
        if record.size > HEAD_BYTES:
            self._pieces.append((HEAD_BYTES, record.size - HEAD_BYTES))
        self._handle: int | None = None
        self._failed = ""
        self._failed_at = 0.0

    def overlaps(self, other: Fetch) -> bool:
        """Whether both go to the same place: the room of one was given to the other before all had read it."""
        return self._target < other._target + other.record.size and other._target < self._target + self.record.size

    def move_on(self, agent: Agent) -> bool:
        """Begin a transfer, or the next one when that is done. False when nothing has changed."""
        if self._failed:
            return False
        try:
            if self._handle is not None:
                if not agent.is_done(self._handle):
                    return False
                self.give_up(agent)
            if self._pieces:
                start, nbytes = self._pieces.pop()
                self._handle = agent.read(self._name, self._source + start, self._target + start, nbytes)
        except PoolError as error:
            self._failed, self._failed_at = str(error), time.monotonic()
        return True

    def outcome(self) -> Fetched | None:
        """What has become of it; None while that is not known."""
        if self._failed and time.monotonic() > self._failed_at + _LIVENESS_SECONDS:
            return Fetched(self._failed.encode())
        return Fetched() if not self._failed and self._handle is None and not self._pieces else None

    def give_up(self, agent: Agent) -> None:
        """Drop the transfer, done or not."""
        handle, self._handle = self._handle, None
        if handle is not None:
            agent.release(handle)


class Fetcher:
    """Runs from its making until `close`; the other methods may be called by any thread.

    Args:
        agent: reads.
        ended: called by the thread with the record of each entry that is here or cannot come; see `Fetched`.
    """

    def __init__(self, agent: Agent, ended: Callable[[Record], None]) -> None:
        self._agent = agent
        self._ended = ended
        self._asked: queue.SimpleQueue[Fetch | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="flowtrain-fetcher", daemon=True)
        self._thread.start()

    def fetch(self, fetch: Fetch) -> None:
        """Begin in the order of these calls. Never waits."""
        self._asked.put(fetch)

    def close(self) -> None:
        """End the thread; what is not here will not come."""
        self._asked.put(None)
        self._thread.join()

    def _run(self) -> None:
        waiting: deque[Fetch] = deque()
        running: list[Fetch] = []
        moved = time.monotonic()
        while True:
            try:
                asked = self._asked.get(block=not waiting and not running)
                if asked is None:
                    break
                waiting.append(asked)
                moved = time.monotonic()
                continue
            except queue.Empty:
                pass
            while waiting and len(running) < _AT_ONCE and not any(map(waiting[0].overlaps, running)):
                running.append(waiting.popleft())
            if self._look(running):
                moved = time.monotonic()
            elif running:
                time.sleep(min(max((time.monotonic() - moved) / _PART, _SHORTEST_SECONDS), _LONGEST_SECONDS))
        for fetch in running:
            try:
                fetch.give_up(self._agent)
            except PoolError:
                continue  # the end of the agent ends it as well

    def _look(self, running: list[Fetch]) -> bool:
        """Move all on; whether any did. Those that have ended leave."""
        moved = [fetch.move_on(self._agent) for fetch in running]
        for fetch in list(running):
            outcome = fetch.outcome()
            if outcome is not None:
                running.remove(fetch)
                self._ended(fetch.record._replace(payload=outcome))
        return any(moved)
