"""Sees to it that a process may open as many files and sockets as connecting with all other ranks takes."""

from __future__ import annotations

import os
import resource

_FOR_ITSELF = 40  # beside what is open before a rank connects: its own ports, its loader, its files
_PER_RANK = 8  # sockets of gloo's groups, and what the pool holds of another rank


def allow_open_files(rank: int, ranks: int) -> None:
    """Raise this process's limit of open files to the number that a job takes, where it is lower.

    Else gloo would abort the process in the midst of the start.

    Args:
        rank: global rank.
        ranks: of the job.

    Raises:
        RuntimeError: the hard limit, which only root can raise, is lower too.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # to count what is open, one more has to be opened
    try:
        opened = len(os.listdir("/proc/self/fd"))
    except OSError:
        opened = hard
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    needed = opened + _FOR_ITSELF + _PER_RANK * (ranks - 1)
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return
    if resource.RLIM_INFINITY != hard < needed:
        raise RuntimeError(
            f"Rank {rank} may have {hard} files and sockets open (`ulimit -Hn`) and has {opened}; with its connections "
            f"to the {ranks - 1} other ranks it needs {needed}. Raise the hard limit on every host, "
            "for example by `nofile` in /etc/security/limits.conf, `LimitNOFILE=` of systemd or "
            "`docker run --ulimit nofile=65536`."
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
