"""Reads a checkpoint directory: ranks of any layout their own parts, or one process all of it."""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.distributed.tensor import DTensor

from flowtrain_lightning.allocator import Allocation
from flowtrain_lightning.checkpoint.checkpoint_index import Index
from flowtrain_lightning.checkpoint.index_file import (
    INDEX,
    DamagedCheckpointError,
    offering_another,
    read_checked,
    read_index,
)
from flowtrain_lightning.checkpoint.local_shard import LocalShard, local_part, refuse_other_shape, run_within
from flowtrain_lightning.checkpoint.loop_progress import with_settled_progress
from flowtrain_lightning.checkpoint.saving import OBJECTS, RANDOM_STATES
from flowtrain_lightning.checkpoint.stored_keys import WEIGHTS, parse_key
from flowtrain_lightning.checkpoint.tensor_files import read_tensors
from flowtrain_lightning.parallel.deepspeed.deepspeed_partition import held_state
from flowtrain_lightning.parallel.halves import HalvedModule, absent_names, role_of
from flowtrain_lightning.parallel.ranks.groups import Groups
from flowtrain_lightning.parallel.ranks.messages import decode_message
from flowtrain_lightning.parallel.ranks.random_streams import global_seed, restore_random_states
from flowtrain_lightning.parallel.regions import (
    ElementRun,
    OptimizerShare,
    Region,
    local_region,
    rows_around_run,
    whole,
)


def load_checkpoint(
    filepath: Any,
    module: HalvedModule,
    allocation: Allocation,
    groups: Groups,
    checkpoint_io: CheckpointIO,
    weights_only: bool | None = None,
    resumes: bool = True,
    shares: Mapping[str, OptimizerShare] | None = None,
) -> dict[str, Any]:
    """Reads this rank's part of a checkpoint directory, or a plain Lightning checkpoint with ``checkpoint_io``.

    Where the module holds a part of a weight, only that is read, of the optimizer's state as well, and lies in the
    dictionary as a `LocalShard`.

    Args:
        filepath: directory or file.
        module: what is to be loaded, in its layout.
        allocation: which halves this rank holds.
        groups: of this rank.
        checkpoint_io: reads plain checkpoints.
        weights_only: False allows objects other than tensors and plain data; only for files you trust.
        resumes: training goes on: optimizers are read and this rank's random states restored, if there are any.
        shares: name -> what this rank's optimizer steps of a parameter, where that is not what the module holds.

    Raises:
        DamagedCheckpointError: names the file and the tensor, and another checkpoint.
    """
    path = Path(filepath)
    if not path.is_dir():
        plain = checkpoint_io.load_checkpoint(filepath, map_location="cpu", weights_only=weights_only is not False)
        return with_settled_progress(plain)
    rank = groups.cross.rank
    roles = (None, *(role for role in allocation.roles if rank in allocation.ranks[role]))
    with offering_another(path):
        index = read_index(path)
        checkpoint = _read_dictionary(
            path,
            index,
            lambda name: role_of(name, module.halves) in roles and name not in absent_names(module),
            weights_only,
            optimizers=resumes,
            layouts=held_state(module),
            shares=shares or {},
        )
        states = decode_message(read_checked(path, RANDOM_STATES, index)) if resumes else []
    if resumes:
        _tell_differences(checkpoint["flowtrain"], path, allocation)
    if rank < len(states):
        restore_random_states(states[rank])
    return checkpoint


def load_half(module: HalvedModule, saved: Mapping[str, Any], roles: Collection[str], strict: bool = True) -> None:
    """Loads the weights that live on this rank.

    Args:
        module: takes them.
        saved: name -> value, of this rank's halves at least: whole tensors, or what `load_checkpoint` gave.
        roles: of this rank.
        strict: whether names that are missing or unknown are an error.

    Raises:
        RuntimeError: the checkpoint is not of this module.
    """
    known = held_state(module)
    absent = absent_names(module)
    own = {name for name in known if role_of(name, module.halves) in (None, *roles) and name not in absent}
    missing, unknown = sorted(own - saved.keys()), sorted(saved.keys() - known.keys())
    if strict and (missing or unknown):
        raise RuntimeError(
            f"The checkpoint does not fit {type(module).__name__}: missing {missing or 'nothing'}, "
            f"unknown {unknown or 'nothing'}. Build the module as it was saved, or set strict_loading=False."
        )
    parts = {name for name in own & saved.keys() if isinstance(known[name], DTensor | ElementRun)}
    module.load_state_dict({name: saved[name] for name in (own & saved.keys()) - parts}, strict=False)
    known = held_state(module)  # loading made FSDP2 move shards that are shorter than those of other ranks
    for name in sorted(parts):
        try:
            _take_part(known[name], saved[name])
        except RuntimeError as error:
            raise RuntimeError(
                f"The checkpoint does not fit {type(module).__name__}: {name}: {error}. Build the module as it was "
                "saved."
            ) from error


def _take_part(held: DTensor | ElementRun, value: Tensor | LocalShard) -> None:
    """Copies what this rank holds of a weight.

    Raises:
        RuntimeError: the value has another shape.
    """
    if isinstance(held, DTensor):
        held.to_local().copy_(local_part(value, held))
    else:
        refuse_other_shape(value.shape, held.shape)
        held.part.copy_(run_within(value, held.start, held.part.numel()))


def read_checkpoint(
    path: Path,
    wanted: Callable[[str], bool] | None = None,
    weights_only: bool | None = None,
    *,
    optimizers: bool = True,
) -> dict[str, Any]:
    """A checkpoint directory as Lightning's dictionary, with whole tensors and optimizer states by parameter name.

    Args:
        path: the directory.
        wanted: says of a parameter or buffer by its name whether it is read; None reads all.
        weights_only: False allows objects other than tensors and plain data; only for files you trust.
        optimizers: whether all is read that training needs to go on: their states, and beside averages the weights.

    Raises:
        DamagedCheckpointError: names the file and the tensor, and another checkpoint.
        ValueError: the directory is no checkpoint, or of another format, or holds other objects.
    """
    with offering_another(path):
        return _read_dictionary(
            path, read_index(path), wanted, weights_only, optimizers=optimizers, layouts={}, shares={}
        )


def read_allocation(path: Path) -> Allocation:
    """The allocation of the run that saved a checkpoint directory.

    Raises:
        ValueError: the directory is no checkpoint of flowtrain, or of another format, or damaged.
    """
    return Allocation.from_state(read_index(path).run)


def _read_dictionary(
    path: Path,
    index: Index,
    wanted: Callable[[str], bool] | None,
    weights_only: bool | None,
    *,
    optimizers: bool,
    layouts: Mapping[str, Any],
    shares: Mapping[str, OptimizerShare],
) -> dict[str, Any]:
    """See `read_checkpoint`.

    ``layouts`` tells by name of a parameter or buffer what it is to be loaded into. Where that is a DTensor, this
    rank's part is read, of entries of the optimizer's state that have its shape as well; where it is an `ElementRun`,
    the rows around that. ``shares`` tells of which
    parameters only some rows of such entries are read.
    """
    checkpoint = {**index.lightning, "flowtrain": index.run, **_read_objects(path, OBJECTS, index, weights_only)}
    _check_places(path, checkpoint, (*index.tensors, *index.values))
    if not optimizers:
        for key in ("optimizer_states", WEIGHTS["current"]):
            checkpoint.pop(key, None)
    states = checkpoint.get("optimizer_states", [])

    def reads(key: str) -> bool:
        place_or_number, name, _ = parse_key(key)
        known = range(len(states)) if isinstance(place_or_number, int) else checkpoint
        is_read = place_or_number in known
        return is_read and (wanted is None or wanted(name))

    found: dict[str, Any] = dict(index.values)
    for name in index.files:
        if name.endswith(".pt") and name != OBJECTS:
            found |= _read_objects(path, name, index, weights_only)
    found = {key: value for key, value in found.items() if reads(key)}
    found |= _read_tensors(path, index, filter(reads, index.tensors), layouts, shares)
    for key, value in found.items():
        place_or_number, name, entry = parse_key(key)
        if isinstance(place_or_number, str):
            checkpoint[place_or_number][name] = value
        else:
            states[place_or_number]["state"].setdefault(name, {})[entry] = value
    return with_settled_progress(checkpoint)


def _check_places(path: Path, checkpoint: Mapping[str, Any], keys: Iterable[str]) -> None:
    """Refuses weights and entries of optimizer states that would be left out without a word."""
    optimizers = range(len(checkpoint.get("optimizer_states", [])))
    for key in keys:
        try:
            place_or_number, _, _ = parse_key(key)
        except ValueError:
            known = False
        else:
            known = place_or_number in (optimizers if isinstance(place_or_number, int) else checkpoint)
        if not known:
            raise DamagedCheckpointError(f"{path / INDEX} is damaged: nothing in it says to what {key!r} belongs.")


def _read_tensors(
    path: Path, index: Index, keys: Iterator[str], layouts: Mapping[str, Any], shares: Mapping[str, OptimizerShare]
) -> dict[str, Any]:
    """Whole tensors, and `LocalShard`s where the layout is that of a DTensor or a run, or a share says so."""
    regions: dict[str, Region] = {}
    shards: set[str] = set()
    for key in keys:
        shape = index.tensors[key].shape
        place_or_number, name, _ = parse_key(key)
        target = layouts.get(name)
        share = shares.get(name) if isinstance(place_or_number, int) else None
        if isinstance(target, DTensor) and tuple(target.shape) == shape:
            regions[key] = local_region(target)
            shards.add(key)
        elif isinstance(target, ElementRun) and isinstance(place_or_number, str) and target.shape == shape:
            regions[key] = rows_around_run(shape, target.start, target.part.numel())
            shards.add(key)
        elif share is not None and share.shape == shape:
            regions[key] = rows_around_run(shape, share.start, share.size)
            shards.add(key)
        else:
            regions[key] = whole(shape)
    return {
        key: LocalShard(part, regions[key], index.tensors[key].shape) if key in shards else part
        for key, part in read_tensors(path, index, regions).items()
    }


def _read_objects(folder: Path, name: str, index: Index, weights_only: bool | None) -> dict[str, Any]:
    if name not in index.files:
        return {}
    data = read_checked(folder, name, index)
    try:
        objects: dict[str, Any] = torch.load(
            io.BytesIO(data), map_location="cpu", weights_only=weights_only is not False
        )
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        raise ValueError(
            f"{folder / name} holds objects that are no tensors or plain data ({found[1] if found else error}), and "
            "reading them may run code. Pass weights_only=False (on the command line: --weights_only false) if you "
            "trust the file."
        ) from error
    return objects


def _tell_differences(saved: Mapping[str, Any], path: Path, allocation: Allocation) -> None:
    if saved["seed"] != global_seed():
        rank_zero_warn(
            f"{path} was made with seed {saved['seed']}, but this run has {global_seed()}: dropout and other random "
            f"draws differ from those of an uninterrupted run. Call seed_everything({saved['seed']}) to go on alike."
        )
    own = allocation.state_dict()
    if any(saved[key] != own[key] for key in ("ranks", "layouts")):
        rank_zero_info(
            f"flowtrain: {path} was saved on another allocation ({Allocation.from_state(saved).describe()}). The run "
            "goes on with the same samples; sums in another order differ in their last bits."
        )
