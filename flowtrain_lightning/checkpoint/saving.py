"""Writes a checkpoint directory: every rank its own part, all of it or nothing."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from flowtrain_lightning.allocator import Allocation
from flowtrain_lightning.checkpoint.checkpoint_index import Index, joined
from flowtrain_lightning.checkpoint.files import (
    make_temporary,
    refuse_unseen,
    refuse_url,
    take_name,
    write_bytes,
    write_file,
    written_together,
)
from flowtrain_lightning.checkpoint.index_file import decode_part, encode_part, stored_file, write_index
from flowtrain_lightning.checkpoint.optimizer_state import NamedState
from flowtrain_lightning.checkpoint.stored_keys import WEIGHTS, with_keys
from flowtrain_lightning.checkpoint.tensor_files import can_store, write_tensors
from flowtrain_lightning.parallel.halves import Halves, role_of
from flowtrain_lightning.parallel.ranks.cross_group import CrossGroup
from flowtrain_lightning.parallel.ranks.groups import Groups
from flowtrain_lightning.parallel.ranks.messages import encode_message
from flowtrain_lightning.parallel.ranks.random_streams import global_seed, random_states
from flowtrain_lightning.parallel.regions import ElementRun, local_region

OBJECTS = "objects.pt"
RANDOM_STATES = "random_states.json"

_MOST_PLAIN_BYTES = 1 << 16
"""Larger tensors would make the index long; Lightning keeps single numbers, such as the best score."""


@dataclass(frozen=True)
class RankPart:
    """The part of a checkpoint that one rank writes.

    Attributes:
        path: the checkpoint.
        temporary: the directory beside it in which it is written.
        rank: who writes.
        values: role -> key -> weight or entry of an optimizer's state.
        rest: Lightning's checkpoint without these.
        states: the random states of all ranks.
    """

    path: Path
    temporary: Path
    rank: int
    values: dict[str, dict[str, Any]]
    rest: dict[str, Any]
    states: list[Any]

    def write(self) -> list[Index]:
        """Writes the values, and returns the index of what was written."""
        return [part for role in self.values for part in _write_half(role, self.values[role], self)]


def save_checkpoint(
    checkpoint: dict[str, Any],
    filepath: Any,
    halves: Halves,
    allocation: Allocation,
    groups: Groups,
    buffers: Collection[str] = (),
) -> None:
    """Writes a checkpoint directory. Every rank calls it with its own part.

    Everything goes into a temporary directory beside ``filepath``, is flushed to the disk and takes its name in one
    step. A kill at any moment leaves the former checkpoint whole.

    Args:
        checkpoint: see `share_out`.
        filepath: see there.
        halves: see there.
        allocation: see there.
        groups: of this rank.
        buffers: see `share_out`.

    Raises:
        FileNotFoundError: a rank does not see the directory: its node has another file system there.
        NotSavedError: on every rank, where one could not write its part; nothing of it is left.
        ValueError: ``filepath`` is a URL.
    """
    cross = groups.cross
    part = share_out(checkpoint, filepath, halves, allocation, groups, buffers)
    try:
        with written_together(part.path, cross):
            parts = part.write()
        index = _join(parts, cross)
        with written_together(part.path, cross):
            if index is not None:
                write_rest(part, index)
    except OSError:  # of all ranks together
        if cross.rank == 0:
            shutil.rmtree(part.temporary)
        cross.barrier()
        raise
    if cross.rank == 0:
        finish(part)


def share_out(
    checkpoint: dict[str, Any],
    filepath: Any,
    halves: Halves,
    allocation: Allocation,
    groups: Groups,
    buffers: Collection[str] = (),
) -> RankPart:
    """Settles who writes what of a checkpoint, and makes the directory in which it is written. Every rank calls it.

    Args:
        checkpoint: Lightning's checkpoint, with this rank's ``state_dict`` and named ``optimizer_states``. Tensors
            that lie on several ranks are equal there, or DTensors. What stands under ``"flowtrain"`` is kept.
        filepath: the directory to write; rank 0's counts.
        halves: role -> module paths.
        allocation: recorded, so that a resume can tell whether the layout is the same.
        groups: of this rank.
        buffers: names in the ``state_dict`` that are no parameters.

    Raises:
        FileNotFoundError: a rank does not see the directory.
        OSError: rank 0 cannot make it.
        ValueError: ``filepath`` is a URL.
    """
    refuse_url(filepath, "The checkpoint path")
    cross = groups.cross
    path = Path(filepath).absolute()
    with written_together(path, cross):
        made = make_temporary(path) if cross.rank == 0 else None
    temporary: Path = cross.broadcast_message(made, 0)
    refuse_unseen(temporary, cross)
    states = cross.gather_messages(random_states())
    own = _take_halves(checkpoint, halves, allocation, cross.rank)
    mine = _share_out(own, {f"{kind}.{name}" for kind in WEIGHTS for name in buffers}, cross)
    values = {role: {key: value for key, value in own[role].items() if key in mine} for role in own}
    return RankPart(path, temporary, cross.rank, values, checkpoint, states)


def _take_halves(
    checkpoint: dict[str, Any], halves: Halves, allocation: Allocation, rank: int
) -> dict[str, dict[str, Any]]:
    """Takes this rank's halves out of the checkpoint: role -> key -> value. What lies on no half stays."""
    optimizers: list[NamedState] | None = checkpoint.pop("optimizer_states", None)
    own: dict[str, dict[str, Any]] = {role: {} for role in allocation.roles if rank in allocation.ranks[role]}
    for key, name, value in with_keys(checkpoint, optimizers or []):
        role = role_of(name, halves)
        if role in own:
            own[role][key] = value
    for key in WEIGHTS.values() & checkpoint.keys():
        weights: dict[str, Any] = checkpoint[key]
        checkpoint[key] = {name: value for name, value in weights.items() if role_of(name, halves) is None}
    if optimizers is not None:
        checkpoint["optimizer_states"] = [{"state": {}, "param_groups": state["param_groups"]} for state in optimizers]
    checkpoint["flowtrain"] = {
        **checkpoint.get("flowtrain", {}),
        "seed": global_seed(),
        **allocation.state_dict(),
        "halves": {role: list(paths) for role, paths in halves.items()},
    }
    return own


def _share_out(own: dict[str, dict[str, Any]], buffers: Collection[str], cross: CrossGroup) -> set[str]:
    """Selects what this rank writes: of ranks that hold a value, or a part of a tensor, alike, one does.

    Which one follows from the key, so that they share the work. Buffers are those of the first rank that holds them,
    of its role or stage: forwards may have written them, on every rank otherwise.

    Args:
        own: role -> key -> value.
        buffers: keys of buffers.
        cross: all ranks.
    """
    held: dict[str, Any] = {}
    for value_of in own.values():
        for key, value in value_of.items():
            held[key] = _place(value)
    of_ranks = [json.loads(text) for text in cross.gather_messages(json.dumps(held))]
    mine = set()
    for key, region in held.items():
        if key in buffers:
            if cross.rank == next(rank for rank, other in enumerate(of_ranks) if key in other):
                mine.add(key)
            continue
        holders = [rank for rank, other in enumerate(of_ranks) if key in other and other[key] == region]
        if holders[zlib.crc32(key.encode()) % len(holders)] == cross.rank:
            mine.add(key)
    return mine


def _place(value: Any) -> list[list[int]] | None:
    """Returns the place of this rank's part in the whole value, in JSON types; None for what is no tensor."""
    if isinstance(value, ElementRun):
        return [[value.start], [value.part.numel()]]
    if not isinstance(value, Tensor):
        return None
    region = local_region(value)
    return [list(region.offsets), list(region.sizes)]


def _write_half(role: str, values: dict[str, Any], part: RankPart) -> list[Index]:
    tensors = {key: value for key, value in values.items() if can_store(value)}
    others = {key: value for key, value in values.items() if key not in tensors}
    return [
        write_tensors(part.temporary, f"{role}/rank-{part.rank:05d}.safetensors", tensors),
        _write_values(others, part.temporary, f"{role}/rank-{part.rank:05d}.pt"),
    ]


def _join(parts: list[Index], cross: CrossGroup) -> Index | None:
    """The index of what all ranks wrote, on rank 0.

    Raises:
        RuntimeError: on every rank, where that is not all of every tensor; see :func:`~.index.joined`.
    """
    # As text, which the other ranks need not parse.
    texts = cross.gather_messages(json.dumps([encode_part(part) for part in parts]))
    index, fault = None, None
    if cross.rank == 0:
        try:
            index = joined(decode_part(part) for text in texts for part in json.loads(text))
        except RuntimeError as error:
            fault = str(error)
    fault = cross.broadcast_message(fault, 0)
    if fault is not None:
        raise RuntimeError(fault)
    return index


def _write_values(values: dict[str, Any], folder: Path, name: str) -> Index:
    """Takes what is plain into the index, and writes the rest, if there is any, into a file of PyTorch's."""
    plain = {key: value for key, value in values.items() if _is_plain(value)}
    objects = {key: value for key, value in values.items() if key not in plain}
    if not objects:
        return Index(values=plain)
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    write_file(objects, path)
    if unsafe := get_unsafe_globals_in_checkpoint(path):
        rank_zero_warn(
            f"The checkpoint holds objects that are no tensors or plain data: {', '.join(sorted(unsafe))}. They come "
            "from hyperparameters, callbacks or `on_save_checkpoint`; to load them, weights_only=False must be given. "
            "Better store their parts as plain data."
        )
    return Index(values=plain, files={name: stored_file(path)})


def _is_plain(value: Any) -> bool:
    """Whether a value can lie in the index as JSON, and come back from there as it was.

    It is made of what ranks can also tell each other, and of no subclass of it: ``collections.Counter``, for one, would
    come back as a dictionary.
    """
    kind = type(value)
    if kind in (list, tuple):
        return all(map(_is_plain, value))
    if kind is dict:
        return all(_is_plain(key) and _is_plain(item) for key, item in value.items())
    if kind is Tensor:
        is_array = value.layout == torch.strided and not value.is_quantized and not value.requires_grad
        return is_array and value.nbytes <= _MOST_PLAIN_BYTES
    return value is None or kind in (bool, int, float, str, type(Path()))


def write_rest(part: RankPart, index: Index) -> None:
    """Writes what no role has, and the index. Rank 0 calls it when all ranks have written.

    Args:
        part: of rank 0.
        index: of what all ranks have written.
    """
    rest, folder = dict(part.rest), part.temporary
    index.run.update(rest.pop("flowtrain"))
    found = _write_values(rest, folder, OBJECTS)
    index.lightning.update(found.values)
    index.files.update(found.files)
    write_bytes(encode_message(part.states), folder / RANDOM_STATES)
    index.files[RANDOM_STATES] = stored_file(folder / RANDOM_STATES)
    write_index(folder, index)


def finish(part: RankPart) -> None:
    """Gives a whole checkpoint its name. Rank 0 calls it."""
    take_name(part.temporary, part.path)
