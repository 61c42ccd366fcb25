"""Ranks that cannot find each other say why."""

from __future__ import annotations

import re
import socket
from datetime import timedelta

import pytest

from flowtrain_lightning.runtime.arrival import root_store


def test_a_port_that_another_run_uses_is_told_as_such_and_no_rank_is_missed(monkeypatch):
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        words = f"Port {port} on 127.0.0.1, at which the ranks are to meet, is in use, by another run perhaps. Set"
        with pytest.raises(RuntimeError, match=f"^{re.escape(words)}"):
            root_store(0, 2, timedelta(seconds=3600))
