"""One rank's end of NIXL: all that is asked of that package, which is optional and has no types.

It reads the memory of ranks on other hosts: by RDMA where there is such a network and UCX, which it brings along, finds
it, else over TCP. Its own thread answers the others, so that an owner that computes keeps no reader waiting.
"""

from __future__ import annotations

import ctypes
import mmap
import secrets
from contextlib import suppress
from typing import Any

from flowtrain_lightning.pool.errors import PoolError

_LOOK_MICROSECONDS = 10_000  # its thread wakes by events, and this often without: 0.2 % of a core. 0 would take all
_CONNECTION_MICROSECONDS = 100_000  # of the thread that connects agents, which is not used
_NO_SHARED_MEMORY = "TLS=^sm"  # ranks of a host share memory by other means; what UCX shares could outlive a kill


class Agent:
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
                "Install it by `pip install flowtrain-lightning[nixl]`, or choose 'auto'."
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
        """What another agent must `meet` to read all that is registered now."""
        try:
            return bytes(self._agent.getLocalMD())
        except Exception as error:
            raise _refused("describe its memory", error) from error

    def meet(self, metadata: bytes) -> str:
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


def _refused(what: str, error: Exception) -> PoolError:
    why = str(error) or type(error).__name__
    return PoolError(f"NIXL could not {what}: {why}. Does UCX_NET_DEVICES name the network that joins the hosts?")
