"""Ranks that cannot find each other say why."""

from __future__ import annotations

import re
import socket
from datetime import timedelta

import pytest

from flowtrain_lightning.parallel import job_store
from flowtrain_lightning.parallel.job_store import root_store
from tests.ports import free_port


@pytest.fixture(autouse=True)
def _nobody_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_store, "_root_stores", {})
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))


def test_a_port_that_another_run_uses_is_told_as_such_and_no_rank_is_missed(monkeypatch):
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        words = f"Port {port} on 127.0.0.1, at which the ranks are to meet, is in use, by another run perhaps. Set"
        with pytest.raises(RuntimeError, match=f"^{re.escape(words)}"):
            root_store(0, 2, timedelta(seconds=3600))


def test_the_store_of_a_second_run_in_the_process_has_that_runs_timeout():
    for seconds in (8, 3600):
        assert root_store(0, 1, timedelta(seconds=seconds)).timeout == timedelta(seconds=seconds)
