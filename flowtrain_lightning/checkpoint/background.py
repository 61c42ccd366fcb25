"""Saving while training goes on: ranks copy what they write to host memory, and threads write it.

The threads of different ranks meet in the directory itself: each leaves there the index of its part, and that of rank 0
joins them and gives the checkpoint its name. No collective runs outside of the main threads.
"""

from __future__ import annotations

import copy
import json
import shutil
import threading
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from flowtrain_lightning.allocator import Allocation
from flowtrain_lightning.checkpoint.checkpoint_index import Index, joined
from flowtrain_lightning.checkpoint.files import NotSavedError, remove, write_bytes
from flowtrain_lightning.checkpoint.index_file import decode_part, encode_part
from flowtrain_lightning.checkpoint.local_shard import LocalShard
from flowtrain_lightning.checkpoint.saving import finish, share_out, write_rest
from flowtrain_lightning.parallel.gradients import local_part
from flowtrain_lightning.parallel.halves import Halves
from flowtrain_lightning.parallel.ranks.cross_group import CrossGroup
from flowtrain_lightning.parallel.ranks.groups import Groups
from flowtrain_lightning.parallel.regions import ElementRun, local_region

_LOOK_SECONDS = 0.05


class BackgroundSave:
    """A checkpoint that threads of all ranks write. Every rank makes one, and calls `finish` before the next one.

    It is as safe from kills as `save_checkpoint`: what had the name keeps it until the new one is whole.

    Args:
        checkpoint: see `share_out`.
        filepath: see there.
        halves: see there.
        allocation: see there.
        groups: of this rank.

    Raises:
        Exception: as `share_out`.
    """

    def __init__(
        self,
        checkpoint: dict[str, Any],
        filepath: Any,
        halves: Halves,
        allocation: Allocation,
        groups: Groups,
        buffers: Collection[str] = (),
    ) -> None:
        part = share_out(checkpoint, filepath, halves, allocation, groups, buffers)
        self.path = part.path
        self._part = replace(
            part,
            values={role: {key: _on_host(value) for key, value in of.items()} for role, of in part.values.items()},
            rest=copy.deepcopy(part.rest) if part.rank == 0 else {},
        )
        self._ranks = groups.cross.ranks
        self._removals: list[Path] = []
        self._lock = threading.Lock()
        self._ended = False
        self._given_up = threading.Event()
        self._fault: str | None = None
        self._thread = threading.Thread(target=self._run, name="flowtrain save", daemon=True)
        self._thread.start()

    def finish(self, cross: CrossGroup) -> None:
        """Waits until the checkpoint has its name. Every rank calls it.

        Raises:
            NotSavedError: on every rank, where one could not write its part; nothing of it is left.
        """
        if cross.rank != 0:  # rank 0's waits for the others'
            self._thread.join()
        self._raise_together(cross.gather_messages(self._fault if cross.rank else None))
        self._thread.join()
        self._raise_together(cross.gather_messages(self._fault))

    def give_up(self) -> None:
        """Lets the thread end when it has written its part, without a checkpoint; for a run that fails."""
        self._given_up.set()

    def remove_afterwards(self, path: Path) -> None:
        """Removes another checkpoint, but not before this one is whole."""
        with self._lock:
            if not self._ended:
                self._removals.append(path)
                return
        remove(path)

    def _raise_together(self, told: list[str | None]) -> None:
        if not any(told):
            return
        self.give_up()
        self._thread.join()
        if self._part.rank == 0:
            shutil.rmtree(self._part.temporary, ignore_errors=True)
        raise NotSavedError(self.path, told, "Earlier ones are as they were.")

    def _run(self) -> None:
        part = self._part
        try:
            parts = part.write()
            text = json.dumps([encode_part(each) for each in parts])
            unnamed = part.temporary / f"writing-{part.rank}.json"
            write_bytes(text.encode(), unnamed)
            unnamed.rename(_index_of(part.temporary, part.rank))
            if part.rank == 0:
                self._complete()
        except Exception as error:  # told by `finish`, on every rank
            self._fault = f"{type(error).__name__}: {error}"
        finally:
            with self._lock:
                self._ended = True

    def _complete(self) -> None:
        found = [_index_of(self._part.temporary, rank) for rank in range(self._ranks)]
        while not all(path.exists() for path in found):
            if self._given_up.wait(_LOOK_SECONDS):
                shutil.rmtree(self._part.temporary, ignore_errors=True)
                return
        write_rest(self._part, _joined(found))
        for path in found:
            path.unlink()
        finish(self._part)
        with self._lock:
            self._ended = True
        for path in self._removals:
            with suppress(FileNotFoundError):
                remove(path)


def _index_of(folder: Path, rank: int) -> Path:
    return folder / f"part-{rank:05d}.json"


def _joined(paths: list[Path]) -> Index:
    return joined(decode_part(part) for path in paths for part in json.loads(path.read_text(encoding="utf-8")))


def _on_host(value: Any) -> Any:
    """A copy that training does not change; of a DTensor, of this rank's part."""
    if isinstance(value, DTensor):
        part = local_part(value).detach().to("cpu", copy=True)
        return LocalShard(part, local_region(value), tuple(value.shape))
    if isinstance(value, ElementRun):
        return replace(value, part=value.part.detach().to("cpu", copy=True))
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else copy.deepcopy(value)
