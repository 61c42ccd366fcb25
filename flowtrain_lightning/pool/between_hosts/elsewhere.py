"""The ranks of other hosts as a mesh sees them: their status pages, and the carrier of entries."""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from flowtrain_lightning.pool.between_hosts.carrier import Carrier
from flowtrain_lightning.pool.between_hosts.hosts import RemoteConnection
from flowtrain_lightning.pool.between_hosts.page_exchange import PageExchange, unacknowledged
from flowtrain_lightning.pool.between_hosts.status_copy import StatusCopy
from flowtrain_lightning.pool.liveness import StatusPage
from flowtrain_lightning.pool.record import Record


class Elsewhere:
    """Runs a thread for pages and one for entries, from its making until `close`; none where all ranks run here.

    Args:
        page: of the calling rank.
        labels: one per rank.
        connections: of each rank of another host. Control records are the mesh's affair.
        wake: called when an entry has arrived.
        fail: called with a sentence and a rank when a peer sends what cannot be true.

    Attributes:
        copies: of the status pages of these ranks.
        arrived: entries that have arrived; see `Carrier`.
    """

    def __init__(
        self,
        page: StatusPage,
        labels: Sequence[str],
        connections: Mapping[int, RemoteConnection],
        wake: Callable[[], None],
        fail: Callable[[str, int | None], None],
    ) -> None:
        self.copies = {peer: StatusCopy(peer, labels[peer]) for peer in connections}
        self.arrived: deque[Record] = deque()
        self._wake = wake
        self._records: list[socket.socket] = []
        self._pages: PageExchange | None = None
        self._carrier: Carrier | None = None
        if not connections:
            return
        self._records = [connection.records for connection in connections.values()]
        pages = {peer: (connection.pages, self.copies[peer]) for peer, connection in connections.items()}
        self._pages = PageExchange(page, pages, len(labels), fail)
        entries = {peer: connection.entries for peer, connection in connections.items()}
        self._carrier = Carrier(entries, self.arrived, wake, fail)

    def tell(self) -> None:
        """Let the other hosts know now what the own status page says."""
        if self._pages is not None:
            self._pages.tell()

    def carry(self, peer: int, record: Record, entry: memoryview) -> None:
        """Send an entry; see `Carrier.send`."""
        assert self._carrier is not None, "there are no other hosts"
        self._carrier.send(peer, record, entry)

    def arrive(self, record: Record) -> None:
        """Add a record to what has arrived. Safe to call from any thread."""
        self.arrived.append(record)
        self._wake()

    def close(self, patience: float) -> None:
        """Send the page a last time and end.

        Args:
            patience: seconds for what is on its way to arrive: to close a connection may cut it off.
        """
        if self._pages is None or self._carrier is None:
            return
        deadline = time.monotonic() + patience
        self._pages.tell(max(patience, 0.0))
        while self._carrier.busy or any(map(unacknowledged, self._records)):
            if time.monotonic() >= deadline:
                break
            time.sleep(0.005)
        self._carrier.close()
        self._pages.close()
