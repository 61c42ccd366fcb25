"""Anonymous shared memory, and the segment of it that each rank owns.

It is made by one process, passed to others as a descriptor, and gone with the last of them. It has no name, so nothing
can be left behind, and it does not count against the size of ``/dev/shm``.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
from pathlib import Path

from flowtrain_lightning.pool.address import MAX_SEGMENT_BYTES
from flowtrain_lightning.pool.memory_region import MemoryRegion
from flowtrain_lightning.pool.pool_errors import PoolError


class Segment:
    """The part of the pool that one rank owns and alone writes: shared memory in two regions.

    Args:
        rank: the owner.
        current_bytes: size of the region for entries of the step that runs.
        ahead_bytes: size of the region for entries of later steps. It is apart, so that work ahead can never take the
            bytes that the step which runs is waiting for.

    Attributes:
        current: the region of the step that runs.
        ahead: the region of later steps.
        nbytes: size of the whole segment.
        memory: the mapped bytes.
        first_byte: where this process has them.
        descriptor: what others map; -1 when it is closed.

    Raises:
        PoolError: when there is not enough memory, or an address could not reach all of it.
    """

    def __init__(self, rank: int, current_bytes: int, ahead_bytes: int) -> None:
        self.current = MemoryRegion(0, current_bytes)
        self.ahead = MemoryRegion(self.current.capacity, ahead_bytes)
        self.nbytes = max(-(-(current_bytes + ahead_bytes) // mmap.PAGESIZE), 1) * mmap.PAGESIZE
        if self.nbytes > MAX_SEGMENT_BYTES:
            raise PoolError(
                f"A segment of {self.nbytes:,} bytes was asked for; an address reaches {MAX_SEGMENT_BYTES:,}. "
                "Lower `PoolSettings(bytes=...)`."
            )
        self.descriptor = create_memory(f"flowtrain segment of rank {rank}", self.nbytes)
        self.memory = map_memory(self.descriptor, self.nbytes)
        self.first_byte = first_byte_of(self.memory)

    def close(self) -> None:
        """Drop the memory; the system takes it back when no process and no tensor uses it any more."""
        if self.descriptor >= 0:
            os.close(self.descriptor)  # the mapping stays for views that are still in use, and ends with the last
            self.descriptor = -1


def create_memory(name: str, nbytes: int) -> int:
    """Make ``nbytes`` of shared memory, all of it backed by pages at once.

    Without that, lack of memory would show as a SIGBUS at some later write. Its size is sealed, so no process that
    maps it can be made to read beyond its end.

    Args:
        name: shown in ``/proc/<pid>/maps`` only.
        nbytes: the size.

    Returns:
        A descriptor that the caller closes.

    Raises:
        PoolError: when there is not enough memory.
    """
    available = available_memory()
    if nbytes > available:
        raise PoolError(_lack(name, nbytes, f"only {available:,} bytes of memory are available"))
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(descriptor, 0, nbytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _seals())
    except OSError as error:
        os.close(descriptor)
        raise PoolError(_lack(name, nbytes, f"the system refused it ({error.strerror})")) from error
    return descriptor


def map_memory(descriptor: int, nbytes: int) -> mmap.mmap:
    """Map shared memory that some process of this machine made, and touch its page tables once.

    Args:
        descriptor: what ``create_memory`` returned, here or in a peer. It can be closed afterwards.
        nbytes: the size that it is said to have.

    Raises:
        PoolError: when it is smaller than that, its size could still be changed, or this process may not map as much.
    """
    size = os.fstat(descriptor).st_size
    sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _seals() == _seals()
    if size < nbytes or not sealed:
        raise PoolError(
            f"A peer passed memory of {size:,} bytes ({'sealed' if sealed else 'not sealed'}); expected {nbytes:,} "
            "bytes whose size is sealed. Do all ranks run the same version?"
        )
    try:
        return mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError as error:
        raise PoolError(
            f"{nbytes:,} bytes of shared memory cannot be mapped ({error.strerror}): this process has a limit of "
            "address space (`ulimit -v`), or too many mappings (`sysctl vm.max_map_count`). Raise it, or lower "
            "`PoolSettings(bytes=...)`."
        ) from error


def first_byte_of(memory: mmap.mmap | bytearray) -> int:
    """The place of these bytes in this process, as a number. It means nothing any more when they are gone."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def available_memory() -> int:
    """Bytes that this process can take without swapping: the machine's, or its control group's when that is less."""
    machine = _machine_memory()
    group = _group_memory()
    return machine if group is None else min(machine, group)


def _seals() -> int:  # no constant, so that the package can be imported where there are none
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _machine_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _group_memory() -> int | None:
    """Bytes that control groups (version 2) leave to this process; None where they set no limit that can be read."""
    try:
        path = Path("/proc/self/cgroup").read_text().rpartition("0::")[2].splitlines()[0]
        folder = Path("/sys/fs/cgroup") / path.lstrip("/")
        limit = (folder / "memory.max").read_text().strip()
        statistics = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        used = int((folder / "memory.current").read_text())
    except (OSError, ValueError, IndexError):
        return None
    if limit == "max":
        return None
    cached = int(statistics.get("active_file", 0)) + int(statistics.get("inactive_file", 0))
    return max(int(limit) - used + cached, 0)


def _lack(name: str, nbytes: int, why: str) -> str:
    return (
        f"{name} asks for {nbytes:,} bytes of shared memory, but {why}. Lower `PoolSettings(bytes=...)` or run "
        "fewer ranks on this machine."
    )
