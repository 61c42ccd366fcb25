"""One rank's end of NIXL, an optional package without types, and the thread that fetches entries by it.

NIXL reads the memory of ranks on other hosts: by RDMA where there is such a network and UCX, which it brings along,
finds it, else over TCP. Its own thread answers the others, so that an owner that computes keeps no reader waiting.
"""

from __future__ import annotations

import ctypes
import mmap
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from flowtrain_lightning.pool.control_records import ControlRecord
from flowtrain_lightning.pool.pool_errors import PoolError

_LOOK_MICROSECONDS = 10_000  # its thread wakes by events, and this often without: 0.2 % of a core. 0 would take all
_CONNECTION_MICROSECONDS = 100_000  # of the thread that connects agents, which is not used
_NO_SHARED_MEMORY = "TLS=^sm"  # ranks of a host share memory by other means; what UCX shares could outlive a kill
_AT_ONCE = 16  # transfers; what is asked for later begins when one of them has ended
_SHORTEST_SECONDS, _LONGEST_SECONDS = 50e-6, 2e-3  # between two looks at what is running
_PAUSES = 8  # between two looks is one of so many parts of the time since the last progress
LIVENESS_SECONDS = 3.0
"""A transfer from a rank that dies fails at once; who died, and how, is known so much later at most."""


class NixlAgent:
    """Reads what other agents have registered. Safe to use from any thread.

    Raises:
        PoolError: from each method, when NIXL cannot do what it was asked to.
    """

    def __init__(self) -> None:
        try:
            import nixl
        except ImportError as error:
            raise PoolError(
                f"'nixl' was chosen between hosts, but that package cannot be imported ({error}). "
                "Install it, pip install 'flowtrain-lightning[nixl]', or choose 'auto'."
            ) from error
        self._nixl: Any = nixl
        self._registered: list[Any] = []
        try:
            config = nixl.nixlAgentConfig()
            config.useProgThread, config.pthrDelay = True, _LOOK_MICROSECONDS
            config.useListenThread, config.lthrDelay = False, _CONNECTION_MICROSECONDS
            config.syncMode = nixl.NIXL_THREAD_SYNC_STRICT
            self._agent: Any = nixl.nixlAgent(f"flowtrain-{secrets.token_hex(8)}", config)
            self._agent.createBackend("UCX", {"engine_config": _NO_SHARED_MEMORY})
        except Exception as error:  # its errors have no base of their own
            raise _refused("start", error) from error

    def register(self, memory: mmap.mmap) -> int:
        """Let transfers use ``memory``, which must stay mapped until `close`; the address of its first byte."""
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        regions = self._nixl.nixlRegDList(self._nixl.DRAM_SEG, [(base, len(memory), 0, "")])
        try:
            self._agent.registerMem(regions, [])
        except Exception as error:
            raise _refused(f"register {len(memory):,} bytes of memory", error) from error
        self._registered.append(regions)
        return base

    def metadata(self) -> bytes:
        """The description that another agent must `add_peer` to read all that is registered now."""
        try:
            return bytes(self._agent.getLocalMD())
        except Exception as error:
            raise _refused("describe its memory", error) from error

    def add_peer(self, metadata: bytes) -> str:
        """Get to know another agent; its name."""
        try:
            name = self._agent.loadRemoteMD(metadata)
        except Exception as error:
            raise _refused("understand what a peer says of its memory", error) from error
        return name.decode() if isinstance(name, bytes) else str(name)

    def read(self, name: str, source: int, target: int, nbytes: int) -> int:
        """Begin to copy bytes from another agent's registered memory into one's own; a handle, for `is_done`."""
        nixl = self._nixl
        try:
            handle: int = self._agent.createXferReq(
                nixl.NIXL_READ,
                nixl.nixlXferDList(nixl.DRAM_SEG, [(target, nbytes, 0)]),
                nixl.nixlXferDList(nixl.DRAM_SEG, [(source, nbytes, 0)]),
                name,
            )
            self._agent.postXferReq(handle)
        except Exception as error:
            raise _refused("begin a transfer", error) from error
        return handle

    def is_done(self, handle: int) -> bool:
        """Whether all bytes are there."""
        try:
            return bool(self._agent.getXferStatus(handle) == self._nixl.NIXL_SUCCESS)
        except Exception as error:
            raise _refused("finish a transfer", error) from error

    def release(self, handle: int) -> None:
        """Forget a transfer; one that still runs is given up."""
        try:
            self._agent.releaseXferReq(handle)
        except Exception as error:
            raise _refused("give up a transfer", error) from error

    def close(self) -> None:
        """End all connections, and with them what still writes; after that memory may be used for something else."""
        for regions in self._registered:
            with suppress(Exception):  # the end of the agent does it as well
                self._agent.deregisterMem(regions, [])
        self._registered.clear()
        self._agent = None


class Fetched(bytearray):
    """The payload of a record that the thread has added: empty when the entry is here, else why it is not."""


class Fetch:
    """An entry on its way.

    Args:
        record: published the entry.
        name: of its owner's agent.
        source: where it lies, in the owner's address space.
        target: where it will lie, in that of this process.
    """

    def __init__(self, record: ControlRecord, name: str, source: int, target: int) -> None:
        self.record = record
        self._name = name
        self._source = source
        self._target = target
        self._handle: int | None = None
        self._failed = ""
        self._failed_at = 0.0

    def begin(self, agent: NixlAgent) -> None:
        """Begin the transfer."""
        try:
            self._handle = agent.read(self._name, self._source, self._target, self.record.size)
        except PoolError as error:
            self._fail(error)

    def outcome(self, agent: NixlAgent) -> Fetched | None:
        """Its outcome; None while that is not known."""
        if self._failed:
            is_told = time.monotonic() > self._failed_at + LIVENESS_SECONDS
            return Fetched(self._failed.encode()) if is_told else None
        try:
            if self._handle is None or not agent.is_done(self._handle):
                return None
            self.give_up(agent)
        except PoolError as error:
            self._fail(error)
            return None
        return Fetched()

    def give_up(self, agent: NixlAgent) -> None:
        """Drop the transfer, done or not."""
        handle, self._handle = self._handle, None
        if handle is not None:
            agent.release(handle)

    def _fail(self, error: PoolError) -> None:
        self._failed, self._failed_at = str(error), time.monotonic()


class Fetcher:
    """A thread that runs from its making until `close`; the other methods may be called by any thread.

    Args:
        agent: reads.
        ended: called by the thread with the record of each entry that is here or cannot come; see `Fetched`.
    """

    def __init__(self, agent: NixlAgent, ended: Callable[[ControlRecord], None]) -> None:
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
        progress = time.monotonic()
        while True:
            try:
                asked = self._asked.get(block=not waiting and not running)
                if asked is None:
                    break
                waiting.append(asked)
                progress = time.monotonic()
                continue
            except queue.Empty:
                pass
            while waiting and len(running) < _AT_ONCE:
                waiting[0].begin(self._agent)
                running.append(waiting.popleft())
            if self._look(running):
                progress = time.monotonic()
            elif running:
                time.sleep(min(max((time.monotonic() - progress) / _PAUSES, _SHORTEST_SECONDS), _LONGEST_SECONDS))
        for fetch in running:
            with suppress(PoolError):  # the end of the agent ends it as well
                fetch.give_up(self._agent)

    def _look(self, running: list[Fetch]) -> bool:
        """Take out those that have ended; whether there were any."""
        ended = False
        for fetch in list(running):
            outcome = fetch.outcome(self._agent)
            if outcome is not None:
                running.remove(fetch)
                self._ended(fetch.record._replace(payload=outcome))
                ended = True
        return ended


def _refused(what: str, error: Exception) -> PoolError:
    why = str(error) or type(error).__name__
    return PoolError(f"NIXL could not {what}: {why}. Does UCX_NET_DEVICES name the network that joins the hosts?")
