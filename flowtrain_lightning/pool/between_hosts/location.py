"""The location of a rank: ranks of one location share memory, all others talk over the network."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from flowtrain_lightning.pool.pool_errors import PoolError

_ANYWHERE = "192.0.2.1"  # an address that is nobody's: it stands for whatever the default route leads to
_MOST_GROUPS = 5  # of ranks that a line names
_GET_ADDRESS = 0x8915  # SIOCGIFADDR


def own_location() -> str:
    """A name that is equal for processes that can share memory, and differs for all others.

    A name alone does not tell hosts apart, nor does the boot of a kernel tell containers apart: ranks find each other
    through the network namespace, and ask for each other's process through the process namespace.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespaces = (os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("net", "pid"))
    return "/".join((socket.gethostname(), boot, *map(str, namespaces)))


def address_towards(host: str) -> str:
    """The own IP address as ``host`` sees it. Nothing is sent.

    Where ``host`` is this machine itself, it is the address of the default route, if there is one.

    Args:
        host: name or address of a host that every rank can reach, for example that of rank 0.

    Raises:
        PoolError: when the name is unknown.
    """
    try:
        address = _source_address(host)
    except OSError as error:
        raise PoolError(
            f"There is no way from here to {host!r} ({error}). Is the name of rank 0's host right?"
        ) from error
    if not address.startswith("127."):
        return address
    try:
        return _source_address(_ANYWHERE)
    except OSError:
        return address


def address_of(interface: str) -> str | None:
    """The first IPv4 address of a network interface of this host, or None where it has none or is not there."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        found = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", interface.encode()))
        return socket.inet_ntoa(found[20:24])
    return None


def interface_of(address: str) -> str | None:
    """The network interface of this host whose first IPv4 address that is, or None where there is none."""
    return next((name for _, name in socket.if_nameindex() if address_of(name) == address), None)


def describe_ways(locations: Sequence[str]) -> str:
    """One line that says which ranks share memory and which talk over the network, however many there are."""
    hosts: dict[str, list[int]] = {}
    for rank, location in enumerate(locations):
        hosts.setdefault(location, []).append(rank)
    if len(hosts) == 1:
        return f"{_ranks(range(len(locations)))} by shared memory"
    groups = [_ranks(ranks) + (" by shared memory" if len(ranks) > 1 else "") for ranks in hosts.values()]
    if len(groups) > _MOST_GROUPS:
        groups[_MOST_GROUPS - 1 :] = [f"{len(groups) - _MOST_GROUPS + 1} more hosts alike"]
    return f"{'; '.join(groups)}; between these {len(hosts)} hosts by network"


def _source_address(host: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return str(probe.getsockname()[0])


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks as a reader writes them: ``ranks 0-3, 8``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"
