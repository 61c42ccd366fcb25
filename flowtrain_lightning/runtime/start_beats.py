"""While ranks that nobody looks after find each other: ends this one, with a sentence, when another one has ended."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from flowtrain_lightning.runtime.process_end import end_at_once, end_children, say_fault

_BEAT_SECONDS = 0.5
SILENT_SECONDS = 30.0  # without a beat: that process has ended, or its whole node
_HEARD_SECONDS = 5.0  # on a busy machine as well
_FAULT = "fault"
_JOINED = "joined"

_counts = itertools.count()


class StartBeats:
    """A context manager for the time in which nothing else tells of the ranks of other nodes, or of other starters.

    Every rank leaves a sign of life in the job's store, again and again, until it has joined the others. Rank 0
    looks at all of them, every rank at what rank 0 or another one says went wrong. All ranks enter equally often.

    Args:
        store: of the job.
        rank: global rank.
        ranks: of the job.
        folder: where ``fault-rank<rank>.txt`` is written.
    """

    def __init__(self, store: Store, rank: int, ranks: int, folder: Path) -> None:
        # Of its own connection: on the other one the main thread may wait for long.
        self._connection = store.clone()  # type: ignore[attr-defined]
        self._store = PrefixStore(f"flowtrain/start/{next(_counts)}", self._connection)
        self._rank = rank
        self._folder = folder
        self._last = dict.fromkeys(range(1, ranks), ("", 0.0)) if rank == 0 else {}  # sign of life, and since when
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="flowtrain-start", daemon=True)

    def __enter__(self) -> StartBeats:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        if error is not None:
            self.tell(f"Rank {self._rank} failed during start-up: {type(error).__name__}: {error}")
        with suppress(RuntimeError):
            self._store.set(str(self._rank), _JOINED)

    def tell(self, sentence: str) -> None:
        """Let the ranks of all nodes know what has ended this one."""
        with suppress(RuntimeError):  # from the store: its node is gone as well
            self._put(sentence)
            self._let_others_hear()

    def _put(self, sentence: str) -> None:
        if not self._store.check([_FAULT]):
            self._store.set(_FAULT, sentence)

    def _let_others_hear(self) -> None:
        """Rank 0 as a rule keeps the store: it stays until the others have read there what has ended it."""
        if self._rank == 0:
            time.sleep(_HEARD_SECONDS)

    def _watch(self) -> None:
        for beat in itertools.count():
            if self._over.wait(_BEAT_SECONDS):
                return
            try:
                self._store.set(str(self._rank), str(beat))
                silent = self._silent()
                if silent is not None:
                    self._put(
                        f"Rank {silent} has ended or was stopped, or its node has, during start-up: nothing was "
                        f"heard of it for {SILENT_SECONDS:.0f} s."
                    )
                fault = self._store.get(_FAULT).decode() if self._store.check([_FAULT]) else None
            except RuntimeError as error:
                fault = f"Rank 0, or whoever keeps what ranks tell each other at the start, has ended ({error})."
            if fault is not None and not self._over.is_set():
                say_fault(fault, self._folder, self._rank)
                self._let_others_hear()
                end_children()
                end_at_once()

    def _silent(self) -> int | None:
        """On rank 0, a rank that was there and has given no sign of life for too long."""
        now = time.monotonic()
        there = [rank for rank, (sign, _) in self._last.items() if sign or self._store.check([str(rank)])]
        signs = self._store.multi_get([str(rank) for rank in there]) if there else []
        for rank, sign in zip(there, (each.decode() for each in signs), strict=True):
            former, since = self._last[rank]
            if sign != former:
                self._last[rank] = (sign, now)
            elif sign != _JOINED and now - since > SILENT_SECONDS:
                return rank
        return None
