"""Other processes of the machine, of this user or another one, neither get into a job nor change what it computes."""

import os
import pickle
import random
import socket
import struct
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from flowtrain_lightning.allocator import Allocation, Layout
from flowtrain_lightning.parallel.ranks.connecting import disconnect_groups
from flowtrain_lightning.parallel.ranks.job_secret import secret_file
from flowtrain_lightning.pool.control_records import ControlRecord, Kind, encode_record
from flowtrain_lightning.runtime.health import process_health
from flowtrain_lightning.runtime.job import Job
from tests.ports import free_port
from tests.processes import Ranks, assert_all_good

NOBODY = 65534
ALLOCATION = Allocation("separate", {"encoder": Layout(1), "backbone": Layout(1)}, {"encoder": (1,), "backbone": (0,)})
SAID = [{"rank": 0}, {"rank": 1}]

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


class Planted:
    """Whoever unpickles it makes a file."""

    def __reduce__(self):
        return Path.touch, (Path(os.environ["FOLDER"], "executed"),)


def rendezvous():
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}


def wait_for(name):
    end = time.monotonic() + 120
    while not Path(os.environ["FOLDER"], name).exists():
        assert time.monotonic() < end, f"nobody made {name}"
        time.sleep(0.01)


def mark(name):
    Path(os.environ["FOLDER"], name).touch()


def join(rank):
    return Job(
        rank,
        ALLOCATION,
        process_health(),
        backend="gloo",
        hang_timeout=120.0,
        timeout=timedelta(seconds=120),
        fault_folder=Path(os.environ["FOLDER"]),
    )


def work(rank):
    """Rank 1 comes when the stranger has said what it has to say at first; both then talk until it has finished."""
    folder = Path(os.environ["FOLDER"])
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    if rank == 1:
        wait_for("first")
    job = join(rank)
    mark(f"joined{rank}")
    finished = False
    while not finished:
        assert job.groups.cross.gather_messages({"rank": rank}) == SAID
        finished = bool(job.groups.cross.broadcast_message((folder / "second").exists(), 0))
    job.leave()
    disconnect_groups()


def plant(store):
    """Puts a pickle wherever rank 1 is to put something: the first one who comes with an address is not believed."""
    for name in ("cross/0/1", "logging/0/1", "store/0/mesh/1"):
        store.set(f"flowtrain/1/{name}", pickle.dumps(Planted()))
    store.set("flowtrain/present/1", pickle.dumps(Planted()))


def speak_as_another_user(rank, ranks):
    """Rank 2 is no rank but another user's process, which knows all that can be seen from outside."""
    if rank < 2:
        work(rank)
        return
    folder = Path(os.environ["FOLDER"])
    wait_for("pid0")
    folder.chmod(0o777)
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    pid = int((folder / "pid0").read_text())
    for file in (f"/proc/{pid}/environ", f"/proc/{pid}/mem", str(secret_file())):
        with pytest.raises((PermissionError, FileNotFoundError)):
            Path(file).read_bytes()
    store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False, timeout=timedelta(seconds=60))
    plant(store)
    mark("first")
    wait_for("joined0")
    wait_for("joined1")
    for key in store.list_keys():
        store.set(key, pickle.dumps(Planted()))
    mark("second")


@as_root
def test_another_user_who_stands_between_the_ranks_is_not_believed():
    with Ranks(speak_as_another_user, 3, env=rendezvous()) as ranks:
        results = ranks.wait(240)
        assert not (ranks.folder / "executed").exists()
    assert_all_good(results)


def messages():
    """What belongs to the listeners of a job: the store's requests, a rank's first words to gloo and to the pool."""
    key, value = b"/flowtrain/1/cross/0/1", bytes(60)
    hello = struct.pack("<BI", 0, 0x3C85F7CE)
    text = struct.pack("<Q", len(key)) + key
    for request in range(1, 20):
        yield hello + struct.pack("<B", request) + text + struct.pack("<Q", len(value)) + value
    yield struct.pack("<i", 0)
    yield struct.pack("<q", 1)
    yield encode_record(ControlRecord(Kind.HELLO, 1, number=2))


def mutated(choose, known):
    message = bytearray(choose.choice(known))
    for _ in range(choose.randrange(1, 8)):
        message[choose.randrange(len(message))] = choose.randrange(256)
    return bytes(message[: choose.randrange(1, len(message) + 1)] + choose.randbytes(choose.choice([0, 0, 8, 200])))


def listeners(pids):
    """The addresses at which these processes listen and let anybody in; not those that they have from their parent."""

    def listening(pid):
        found = psutil.Process(pid).net_connections("tcp4")
        return {each.laddr for each in found if each.status == psutil.CONN_LISTEN}

    return sorted(filter(lets_in, set().union(*map(listening, pids)) - listening(os.getppid())))


def lets_in(address):
    try:
        socket.create_connection(address, 1).close()
    except TimeoutError:
        return False
    return True


def shout(choose, pids, count):
    """Says ``count`` mutated messages to each address at which these processes listen."""
    known, addresses = list(messages()), listeners(pids)
    assert addresses
    for _ in range(count):
        for address in addresses:
            with suppress(OSError), socket.create_connection(address, 5) as connection:
                connection.sendall(mutated(choose, known))


def shout_at_all(rank, ranks, count):
    """Rank 2 is no rank but shouts at every listener, while the ranks meet and while they work."""
    if rank < 2:
        work(rank)
        return
    folder, choose = Path(os.environ["FOLDER"]), random.Random(0)
    wait_for("pid0")
    wait_for("pid1")
    time.sleep(1.0)
    pids = [int((folder / f"pid{each}").read_text()) for each in range(2)]
    shout(choose, pids[:1], count)
    mark("first")
    wait_for("joined0")
    wait_for("joined1")
    shout(choose, pids, count)
    mark("second")


@pytest.mark.parametrize("count", [50, pytest.param(10_000, marks=pytest.mark.full)])
def test_mutated_messages_at_every_listener_end_nothing_and_change_nothing(count):
    with Ranks(shout_at_all, 3, [count], rendezvous()) as ranks:
        assert_all_good(ranks.wait(600))
