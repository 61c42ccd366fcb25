"""Free ports where the ranks of a test meet: none that the system gives to connections, for those may take it first."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_FEWEST = 10_000
_TRIES = 100


def free_port() -> int:
    """A TCP port that nobody listens to, below those that the system gives out by itself.

    Between the choice and its use seconds may pass. Other tests choose at random among ten thousand.
    """
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    choose = random.SystemRandom()  # the seed of a test does not reach it
    for _ in range(_TRIES):
        port = choose.randrange(max(first - _FEWEST, 1024), first)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"{_TRIES} ports below {first} were tried, and somebody listens to each of them.")
