"""Ranks end together: real processes that are killed, stopped, hang or fail."""

import bdb
import ctypes
import io
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, redirect_stderr
from pathlib import Path

import psutil
import pytest
from torch.utils.data import DataLoader

from flowtrain_lightning.pool import PeerFailed, Pool
from flowtrain_lightning.runtime.health import HealthMonitor
from flowtrain_lightning.runtime.process_end import die_with_parent, say_fault
from flowtrain_lightning.runtime.watched_process import WatchedProcess
from tests.leftovers import abandoned_files, newly_abandoned_files
from tests.pool.faults import slowness
from tests.pool.ranks import join_job
from tests.processes import Ranks, assert_all_good, run_ranks

HANG = 1.5 * min(slowness(), 4.0)
"""Seconds without progress that are a hang; longer where a healthy rank may have to wait for a processor."""
START = 1800.0


def folder():
    return Path(os.environ["FOLDER"])


def mark(name):
    (folder() / name).touch()


def start(rank, ranks, hang=HANG):
    mesh = join_job(rank, ranks)
    health = HealthMonitor()
    health.join(mesh, hang, START, folder() / "faults")
    return mesh, Pool.open(mesh, 1 << 16, 0), health


def wait_for_rank_1(rank, ranks):
    """Rank 1 is in step 3; rank 0 waits for it in the pool, rank 2 in a call that never ends."""
    mesh, pool, health = start(rank, ranks, 60)
    if rank == 1:
        mesh.page.enter("forward of encoder batch 5", 3)
        while not all(mesh.board[peer].waits for peer in (0, 2)):
            time.sleep(0.01)
        mark("ready")
        time.sleep(600)
    mesh.page.enter("wait for features", 3)
    if rank == 2:
        subprocess.Popen(["sleep", "600"])  # as a worker that loads data
        time.sleep(600)
    try:
        while True:
            pool.poll(60)
    except PeerFailed as error:
        print(f"left by itself: {error}")
        health.leave()
        sys.exit(5)


def fault(ranks, rank):
    return (ranks.folder / "faults" / f"fault-rank{rank}.txt").read_text()


@pytest.fixture
def shared_memory_files():
    before = abandoned_files()
    yield
    assert not newly_abandoned_files(before)


@pytest.mark.usefixtures("shared_memory_files")
def test_a_kill_ends_all_ranks_and_what_they_have_started_wherever_they_wait():
    with Ranks(wait_for_rank_1, 3) as ranks:
        ranks.wait_for("ready")
        began = time.monotonic()
        ranks.signal(1, signal.SIGKILL)
        results = ranks.wait()
        assert time.monotonic() - began < HANG + 8 * slowness()
        sleeping = [p for p in psutil.process_iter(["cmdline", "pid"]) if p.info["cmdline"] == ["sleep", "600"]]
        assert not [p for p in sleeping if os.getpgid(p.pid) == ranks.group(2)], "a worker was left"
        assert [result.code for result in results] == [5, -signal.SIGKILL, 1], "\n".join(map(str, results))
        for rank in (0, 2):
            for text in (fault(ranks, rank), results[rank].err):
                assert "Rank 1 (encoder 0) died (process" in text
                assert "in phase 'forward of encoder batch 5' of step 3" in text
        assert "left by itself: Rank 1 (encoder 0)" in results[0].out
        last = results[2].err.strip().splitlines()[-1]
        assert last.startswith("flowtrain: rank 2 ends. Rank 1 (encoder 0) died (process"), "what is read last"
        assert not list((ranks.folder / "faults").glob("*.unfinished"))


def say_fault_where_no_room_is_left(rank, ranks, faults):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    with redirect_stderr(io.StringIO()) as said:
        say_fault("Rank 1 died.", faults, rank)
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert said.getvalue() == "\nflowtrain: Rank 1 died.\n"


def test_a_fault_for_which_the_disk_has_no_room_leaves_no_file(tmp_path):
    assert_all_good(run_ranks(say_fault_where_no_room_is_left, 1, arguments=[tmp_path / "faults"]))
    assert not list((tmp_path / "faults").iterdir())


def all_wait(rank, ranks):
    mesh, pool, health = start(rank, ranks)
    mesh.page.enter(f"wait for rank {1 - rank}", 4)
    try:
        while True:
            pool.poll(60)
    finally:
        health.leave()  # as a job does at its end: whoever is woken by the other rank's word says why as well


def test_ranks_that_wait_for_each_other_are_all_named():
    with Ranks(all_wait, 2) as ranks:
        results = ranks.wait(60)
        for rank in range(2):
            assert results[rank].code == 1
            assert "All ranks wait for each other" in fault(ranks, rank)
            assert "'wait for rank 0' of step 4" in fault(ranks, rank)
            assert "'wait for rank 1' of step 4" in fault(ranks, rank)


def is_slow(rank, ranks):
    """One rank makes slow progress, the other one none for longer than the limit: that is no hang."""
    mesh, pool, health = start(rank, ranks)
    mesh.page.enter("wait" if rank else "first step", 0)
    for _ in range(10):
        time.sleep(HANG / 4)
        if rank == 0:
            mesh.page.enter("first step", 0)
    health.leave()
    pool.close()
    mesh.close()


def starts_slowly(rank, ranks):
    """One rank takes longer for its start than a step may take without progress."""
    mesh, pool, health = start(rank, ranks)
    mesh.page.enter("wait for all ranks" if rank else "start up", -1)
    time.sleep(2 * HANG)
    health.leave()
    pool.close()
    mesh.close()


def ends_early(rank, ranks):
    """Rank 1 leaves in good order long before rank 0 does."""
    mesh, pool, health = start(rank, ranks)
    if rank == 0:
        mesh.page.enter("write the checkpoint", 1)
        time.sleep(HANG * 0.8)
    health.leave()
    pool.close()
    mesh.close()


def fails_and_hangs(rank, ranks):
    """Rank 1 fails, and its clean-up never ends."""
    mesh, _, health = start(rank, ranks)
    if rank == 1:
        mesh.page.enter("forward", 1)
        mesh.page.fail("ValueError: bad picture")
        health.leave()
        mesh.close()
    time.sleep(600)


def test_a_rank_whose_clean_up_hangs_ends_too():
    results = run_ranks(fails_and_hangs, 2)
    assert [result.code for result in results] == [1, 1]
    assert all("ValueError: bad picture" in result.err for result in results)


def fails_alone(rank, ranks):
    """Its error is left to its user."""
    mesh, _, health = start(rank, ranks, hang=0.2)
    mesh.page.fail("an error that the user handles")
    time.sleep(1)
    health.leave()
    mesh.close()


def hangs_alone(rank, ranks):
    mesh, _, health = start(rank, ranks)
    mesh.page.enter("compute microbatch 3", 7)
    time.sleep(600)
    health.leave()


def test_a_single_rank_that_hangs_ends_and_says_where():
    with Ranks(hangs_alone, 1) as ranks:
        (result,) = ranks.wait(60)
        assert result.code == 1
        for text in (fault(ranks, 0), result.err):
            assert "Rank 0 (backbone 0) made no progress for" in text
            assert "in phase 'compute microbatch 3' of step 7" in text
        assert "time.sleep(600)" in fault(ranks, 0)


def await_guard(mesh):
    def there():
        return any("lock_guard" in " ".join(child.cmdline()) for child in psutil.Process().children())

    until = None  # it is told of this process
    while until is None or time.monotonic() < until:
        mesh.page.enter("compute microbatch 3", 7)  # else a busy machine takes this for a hang
        time.sleep(0.05)
        until = until or (time.monotonic() + 1 if there() else None)


def holds_alone(rank, ranks):
    mesh, _, _ = start(rank, ranks)
    progress = threading.Thread(target=lambda: [mesh.page.enter("compute microbatch 4", 7), time.sleep(600)])
    await_guard(mesh)
    progress.start()
    mark("ready")
    ctypes.PyDLL(None).sleep(600)  # as an extension in C does that never releases the interpreter's lock


def test_a_single_rank_that_holds_the_interpreter_is_ended_from_outside():
    with Ranks(holds_alone, 1) as ranks:
        ranks.wait_for("ready")
        (result,) = ranks.wait(60 + 10 * slowness())
        assert result.code == -signal.SIGKILL
        for text in (fault(ranks, 0), result.err):
            assert "Rank 0 (backbone 0) was held for" in text
            assert "in phase 'compute microbatch 4' of step 7" in text
            assert "keeps the interpreter's lock" in text
            assert "in holds_alone" in text
        assert (
            result.err.strip().splitlines()[-1].startswith("flowtrain: rank 0 ends. Rank 0 (backbone 0) was held for")
        )
        assert not list((ranks.folder / "faults").glob("*.unfinished"))


def is_guarded(rank, ranks):
    """Of a rank that ends in good order no guard is left."""
    mesh, _, health = start(rank, ranks, hang=600)
    await_guard(mesh)
    health.leave()
    assert not psutil.Process().children()
    mesh.close()


def is_debugged(rank, ranks):
    """The main thread stands in a debugger for longer than the limit, as at a breakpoint."""
    mesh, _, health = start(rank, ranks)
    mesh.page.enter("compute microbatch 3", 7)
    bdb.Bdb().runcall(time.sleep, 2 * HANG)
    health.leave()
    mesh.close()


HARMLESS = {is_slow: 2, starts_slowly: 2, ends_early: 2, fails_alone: 1, is_guarded: 1, is_debugged: 1}
"""What each says of itself is no fault; with the number of ranks that do it."""


def test_what_is_no_fault_ends_nobody_and_says_nothing():
    with ExitStack() as running:
        started = {what: running.enter_context(Ranks(what, ranks)) for what, ranks in HARMLESS.items()}
        for what, ranks in started.items():
            ended = [(result.code, result.out, result.err) for result in ranks.wait()]
            assert ended == [(0, "", "")] * HARMLESS[what], what.__name__


def test_a_start_removes_fault_files_of_the_run_before_but_none_of_its_own(tmp_path):
    for rank in range(4):
        say_fault("Rank 3 failed.", tmp_path, rank)
    (tmp_path / "fault-ranks.txt").touch()
    with HealthMonitor().starting(tmp_path, 0, 2, HANG):
        assert sorted(path.name for path in tmp_path.iterdir()) == ["fault-rank1.txt", "fault-ranks.txt"]


def child_of(rank, ranks):
    die_with_parent()
    mark("child")
    time.sleep(600)


def launches(rank, ranks):
    """A process that starts another one."""
    child = multiprocessing.get_context("fork").Process(target=child_of, args=(0, 1))
    child.start()
    (folder() / "pid").write_text(str(child.pid))
    time.sleep(600)


def test_children_die_with_their_parent():
    with Ranks(launches, 1) as ranks:
        ranks.wait_for("child")
        ranks.wait_for("pid")
        child = psutil.Process(int((ranks.folder / "pid").read_text()))
        ranks.signal(0, signal.SIGKILL)
        _, alive = psutil.wait_procs([child], timeout=60)
        assert not alive


def orphan(rank, ranks):
    die_with_parent(parent=1 << 22)
    print("still here")


def test_a_process_whose_parent_has_died_already_ends_at_once():
    (result,) = run_ranks(orphan, 1)
    assert (result.code, result.out) == (1, "")


def loads_data(rank, ranks):
    loader = DataLoader(range(4), num_workers=1, worker_init_fn=die_with_parent)
    print(sum(int(batch) for batch in loader))


def test_a_worker_that_loads_data_can_be_tied_too():
    (result,) = run_ranks(loads_data, 1)
    assert (result.code, result.out) == (0, "6\n"), result.err


def starts_another(rank, ranks, code, needed):
    """Rank 0 and its child, rank 1, that has ended; they are not connected."""
    os.chdir(folder())  # where a rank outside of fit writes what ended it
    health = HealthMonitor()
    health.name_ranks(["backbone 0", "encoder 0"])
    child = WatchedProcess(os.getpid(), lambda: int(code))
    if needed:
        with health.starting(folder(), 0, 2, HANG):
            health.watch_processes(0, {1: child})
            time.sleep(1)
    health.watch_processes(0, {1: child})
    time.sleep(1)
    print("went on")


def outcome(code, needed=""):
    (result,) = run_ranks(starts_another, 1, arguments=(str(code), needed))
    return result.code, result.err + result.out


def test_a_child_that_ended_with_an_error_ends_rank_0():
    code, said = outcome(3)
    assert code == 1
    assert "flowtrain: Rank 1 (encoder 0) ended with exit code 3 outside of fit. Its own output says why." in said


def test_any_child_that_has_ended_does_so_while_rank_0_needs_it():
    code, said = outcome(0, "needed")
    assert code == 1
    assert "Rank 1 (encoder 0) ended with exit code 0 during start-up, before it had joined the other ranks" in said


def test_a_child_that_has_done_its_work_does_not():
    assert outcome(0) == (0, "went on\n")


def ends_behind_a_goodbye(rank, ranks):
    """A child that ends with an error while the ranks are connected: its status page tells more than its code."""
    mesh, pool, health = start(rank, ranks)
    if rank == 0:
        codes = [3]
        health.watch_processes(0, {1: WatchedProcess(os.getpid(), lambda: codes[0])})
        time.sleep(1)
        codes[0] = 0  # as soon as it has left it looks at codes again
    health.leave()
    pool.close()
    mesh.close()
    print("went on", flush=True)
    os._exit(0)


def test_while_ranks_are_connected_their_pages_count_and_not_their_codes():
    assert [(result.code, result.out) for result in run_ranks(ends_behind_a_goodbye, 2)] == [(0, "went on\n")] * 2
