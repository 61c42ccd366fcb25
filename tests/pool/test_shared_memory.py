"""Anonymous shared memory, and the segment that a rank owns."""

import fcntl
import os
import resource

import pytest

from flowtrain_lightning.pool import Key, PoolError
from flowtrain_lightning.pool.shared_memory import Segment, available_memory, create_memory, map_memory
from tests.processes import assert_all_good, run_ranks

KEY = Key(0, 0, 0)


def test_it_is_mapped_by_descriptor_and_shared():
    descriptor = create_memory("test", 8192)
    one, other = map_memory(descriptor, 8192), map_memory(descriptor, 8192)
    os.close(descriptor)
    one[100:105] = b"hello"
    assert other[100:105] == b"hello"


def test_its_size_can_never_change():
    descriptor = create_memory("test", 8192)
    for size in (0, 4096, 16384):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    os.close(descriptor)


def test_more_than_the_machine_has_is_refused_with_a_sentence_at_once():
    with pytest.raises(
        PoolError, match=r"only [\d,]+ bytes of memory are available\. Lower `PoolSettings\(bytes=...\)`"
    ):
        create_memory("test", available_memory() + (1 << 30))


def map_with_little_address_space(rank, ranks):
    descriptor = create_memory("test", 64 << 20)
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (32 << 20), resource.RLIM_INFINITY))
    with pytest.raises(PoolError, match=r"67,108,864 bytes of shared memory cannot be mapped .*`ulimit -v`"):
        map_memory(descriptor, 64 << 20)
    os.close(descriptor)


def test_a_limit_of_address_space_that_is_too_low_is_named():
    assert_all_good(run_ranks(map_with_little_address_space, 1, 60))


def write_with_a_limit_of_file_sizes(rank, ranks):
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    with pytest.raises(
        PoolError, match=r"asks for 2,097,152 bytes of shared memory, but the system refused it \(File too"
    ):
        create_memory("test", 2 << 20)


def test_a_limit_of_file_sizes_that_is_too_low_is_named():
    assert_all_good(run_ranks(write_with_a_limit_of_file_sizes, 1, 60))


def test_memory_that_a_peer_could_still_shrink_is_not_mapped():
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 8192)
    with pytest.raises(PoolError, match="not sealed"):
        map_memory(descriptor, 8192)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    with pytest.raises(PoolError, match="8,192 bytes"):
        map_memory(descriptor, 16384)
    os.close(descriptor)


def test_work_ahead_never_takes_the_bytes_of_the_step_that_runs():
    segment = Segment(3, 1024, 512)
    assert segment.ahead.allocate(KEY, 512) == 1024
    assert segment.ahead.allocate(KEY, 1) is None
    assert segment.current.allocate(KEY, 1024) == 0
    assert segment.nbytes == len(segment.memory)
    segment.close()
    segment.close()


def test_a_segment_may_have_no_capacity_at_all():
    segment = Segment(0, 0, 0)
    assert segment.current.allocate(KEY, 1) is None
    segment.close()


def test_more_than_an_address_reaches_is_refused():
    with pytest.raises(PoolError, match="an address reaches"):
        Segment(0, 1 << 37, 1)
