"""The command ``flowtrain doctor``: what this machine offers, by looking and by trying it out."""

from __future__ import annotations

import multiprocessing
import os
import platform
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from flowtrain_lightning.attention import flash_kernel, is_hopper, torch_varlen_kernel
from flowtrain_lightning.cli.command_table import command_parser
from flowtrain_lightning.pool import (
    MAX_OWNERS,
    MAX_SEGMENT_BYTES,
    ORDERED_STORES,
    WAIT_LIMITS,
    CudaRuntime,
    DeviceRuntime,
    Mesh,
    PoolError,
    address_layout,
    available_memory,
    open_device_tier,
    self_test,
)

MISTAKES = ()

_TIER = "device tier"
_TIER_SECONDS = 180

REQUIRED = ("flowtrain-lightning", "torch", "lightning", "torchmetrics", "numpy", "scipy")

OPTIONAL = {
    "jsonargparse": ("flowtrain fit, validate, test and predict", "cli"),
    "pillow": ("reading pictures", "data"),
    "tokenizers": ("a tokenizer.json", "data"),
    "datasets": ("data sets of Hugging Face", "data"),
    "pyarrow": ("Parquet", "data"),
    "universal-pathlib": ("data on remote stores", "data"),
    "av": ("videos", "video"),
    "soundfile": ("audio", "audio"),
    "diffusers": ("the recipe that draws", "diffusers"),
    "transformers": ("models of Hugging Face", "transformers"),
    "peft": ("LoRA and other adapters", "peft"),
    "numba": ("packing a hundred times faster", "pack"),
    "matplotlib": ("pictures of plans, losses and timelines", "plot"),
    "wandb": ("WandbLogger", "wandb"),
    "deepspeed": ("layouts by ZeRO", "deepspeed"),
    "flash-attn": ("attention on GPUs", "flash-attn"),
    "bitsandbytes": ("optimizer moments in 8 bits", "bitsandbytes"),
    "ray": ("measuring data on a cluster", "ray"),
    "nixl": ("the pool between hosts by RDMA, where it is asked for", "nixl"),
}
"""Packages that need not be there: what each is for, and the extra that installs it."""


@dataclass(frozen=True)
class Fact:
    """One line of the report.

    Attributes:
        name: what was looked for.
        found: whether it is there.
        meaning: its version or size where it is there, and what follows from that.
    """

    name: str
    found: bool
    meaning: str

    def __str__(self) -> str:
        return f"{self.name:<20} {'ok' if self.found else 'absent':<8} {self.meaning}"


def run() -> None:
    """Print what this machine offers, one line each."""
    parser = command_parser("doctor")
    parser.add_argument("--pool", action="store_true", help="look at the pool instead, and pass entries through it")
    options = parser.parse_args(sys.argv[2:])
    for finding in examine_pool() if options.pool else examine():
        print(finding)


def examine() -> Iterator[Fact]:
    """Look at everything, in the order in which it is printed."""
    yield from _versions()
    yield from _devices()
    yield from _kernel_services()
    yield from _attention_kernels()


def examine_pool() -> Iterator[Fact]:
    """Look at the pool: addresses, limits, ways between ranks, and a self-test between two processes."""
    yield Fact("address", True, f"64 bits: {address_layout()}")
    yield Fact("owners", True, f"up to {MAX_OWNERS:,} ranks")
    yield Fact("segment", True, f"up to {MAX_SEGMENT_BYTES / 2**30:,.0f} GiB per rank, as far as addresses reach")
    yield Fact("memory", True, f"{available_memory() / 2**30:.1f} GiB for the segments of all ranks of this host")
    yield Fact("shared_memory", _works(_probe_memfd), "between ranks of one host: readers map the owner's segment")
    yield Fact("network", True, "between hosts: TCP, both ends prove that they know the job's secret")
    yield Fact("inboxes", ORDERED_STORES, "records without system calls; elsewhere they go through sockets")
    try:
        found = self_test()
    except (PoolError, OSError) as error:
        yield Fact("self-test", False, str(error))
        return
    counters = found.counters
    yield Fact("put", True, f"{found.put_bytes_per_second / 1e9:.1f} GB/s, entries of 16 MiB")
    yield Fact("round trip", True, f"{found.round_trip_seconds * 1e6:.0f} us from put to release, both ranks asleep")
    yield Fact("occupancy", counters.current.now == 0, f"at most {counters.current.peak:,} bytes; none is left")
    waits = ", ".join(
        f"{count} below {limit * 1e6:,.0f} us"
        for limit, count in zip(WAIT_LIMITS, counters.wait_histogram, strict=False)
        if count
    )
    yield Fact("waits", True, f"{counters.waits}: {waits}")
    yield _examine_network()


def examine_device_tier(make_runtime: Callable[[int], DeviceRuntime]) -> Fact:
    """Whether two processes can read each other's device memory, tried out as at the start of a run.

    Args:
        make_runtime: the device of process 0 or 1; called in that process, which is spawned.
    """
    spawn = multiprocessing.get_context("spawn")  # CUDA does not work in forks
    receiver, sender = spawn.Pipe(duplex=False)
    reasons: list[str] = []
    with tempfile.TemporaryDirectory(prefix="flowtrain-") as folder:
        arguments = (Path(folder) / "store", make_runtime, sender)
        ranks = [spawn.Process(target=_open_tier, args=(rank, *arguments), daemon=True) for rank in range(2)]
        try:
            for rank in ranks:
                rank.start()
            sender.close()
            while len(reasons) < len(ranks) and receiver.poll(_TIER_SECONDS):
                reasons.append(receiver.recv())
        except EOFError:  # they have ended
            reasons.append("a process that opens it ended at once")
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
    failed = [reason for reason in (*reasons, "it took too long")[: len(ranks)] if reason]
    if failed:
        return Fact(_TIER, False, f"{failed[0]}: features and gradients go through host memory")
    return Fact(_TIER, True, "features and gradients pass between processes in GPU memory, by CUDA IPC")


def _open_tier(rank: int, store: Path, make_runtime: Callable[[int], DeviceRuntime], sender: Connection) -> None:
    """Tries the device tier in one process; says why it cannot, or an empty text."""
    try:
        mesh = Mesh.connect(FileStore(str(store), 2), rank, 2, ("process 0", "process 1"), _TIER_SECONDS)
        tier = open_device_tier(mesh, make_runtime(rank), 1 << 20)
        sender.send("; ".join(tier.refusals))
        tier.close()
        mesh.close()
    except (RuntimeError, OSError) as error:
        sender.send(str(error))


def _cuda_of(rank: int) -> CudaRuntime:
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return CudaRuntime(device)


def _examine_network() -> Fact:
    try:
        found = self_test(apart=True)
    except (PoolError, OSError) as error:
        return Fact("between hosts", False, str(error))
    speed, round_trip = found.passed_bytes_per_second / 1e9, found.round_trip_seconds * 1e6
    figures = f"{speed:.1f} GB/s in entries of 16 MiB, {round_trip:.0f} us from put to release"
    return Fact("between hosts", True, f"{figures}, over this machine's own network; a real one is slower")


def _versions() -> Iterator[Fact]:
    yield Fact("python", True, platform.python_version())
    for package in REQUIRED:
        installed = _version(package)
        yield Fact(package, installed is not None, installed or "required; install flowtrain-lightning again")
    for package, (purpose, extra) in OPTIONAL.items():
        installed = _version(package)
        command = f'{purpose}: pip install "flowtrain-lightning[{extra}]"'
        yield Fact(package, installed is not None, f"{installed} ({purpose})" if installed else command)


def _devices() -> Iterator[Fact]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Fact("processor", True, f"{cores} cores, {_processor()}, {_memory_bytes() / 2**30:.0f} GiB memory")
    limit = os.environ.get("OMP_NUM_THREADS", "not set")
    yield Fact("threads", True, f"{torch.get_num_threads()} per process (OMP_NUM_THREADS: {limit})")
    if torch.cuda.is_available():
        names = ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())}))
        yield Fact("CUDA", True, f"{torch.cuda.device_count()} GPUs, {names}")
        yield examine_device_tier(_cuda_of)
    else:
        yield Fact("CUDA", False, "training runs on the CPU")
        yield Fact(_TIER, False, "no GPU: features and gradients go through host memory, as with tier='host'")
    yield Fact("gloo", dist.is_gloo_available(), "process groups on the CPU; no run of several ranks without it")
    yield Fact("NCCL", dist.is_nccl_available(), "process groups on GPUs")


def _kernel_services() -> Iterator[Fact]:
    for name, probe, purpose in (
        ("memfd", _probe_memfd, "the pool's memory: without a name, so nothing is left behind"),
        ("pidfd", _probe_pidfd, "the death of a rank is noticed at once"),
        ("abstract sockets", _probe_abstract_socket, "ranks of one host find each other without a file"),
        ("descriptor passing", _probe_descriptor_passing, "ranks of one host map each other's memory"),
    ):
        yield Fact(name, _works(probe), purpose)


def _attention_kernels() -> Iterator[Fact]:
    cuda = torch.cuda.is_available()
    flash = cuda and flash_kernel(is_hopper(torch.device("cuda"))) is not None
    yield Fact("flash-attn", flash, "packed attention on GPUs in half precision, first choice")
    yield Fact("varlen_attn", cuda and _has_varlen_kernel(), "the same, from PyTorch 2.11 on")
    yield Fact("SDPA", True, "packed attention sequence by sequence, everywhere else")


def _has_varlen_kernel() -> bool:
    try:
        torch_varlen_kernel()
    except (ImportError, RuntimeError):
        return False
    return True


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _works(probe: Callable[[], None]) -> bool:
    """Whether the kernel offers what ``probe`` uses: Python leaves out what the system has not, containers forbid."""
    try:
        probe()
    except (AttributeError, OSError):
        return False
    return True


def _probe_memfd() -> None:
    os.close(os.memfd_create("flowtrain-doctor", os.MFD_ALLOW_SEALING))


def _probe_pidfd() -> None:
    os.close(os.pidfd_open(os.getpid()))


def _probe_abstract_socket() -> None:
    with closing(socket.socket(socket.AF_UNIX)) as server:
        server.bind(f"\0flowtrain-doctor-{os.getpid()}")


def _probe_descriptor_passing() -> None:
    one, other = socket.socketpair(socket.AF_UNIX)
    with closing(one), closing(other):
        socket.send_fds(one, [b"x"], [one.fileno()])
        _, descriptors, _, _ = socket.recv_fds(other, 1, 1)
        for descriptor in descriptors:
            os.close(descriptor)
