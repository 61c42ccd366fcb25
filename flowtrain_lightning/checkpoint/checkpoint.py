"""A checkpoint directory: written by all ranks together, read by ranks of any layout or by one process."""

from __future__ import annotations

import pickle
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint

from flowtrain_lightning.allocator import ROLES, Allocation
from flowtrain_lightning.checkpoint.files import (
    make_temporary,
    refuse_unseen,
    refuse_url,
    take_name,
    write_file,
    written_together,
)
from flowtrain_lightning.checkpoint.optimizer_state import NamedState
from flowtrain_lightning.checkpoint.tensors import load_tensors, save_tensors
from flowtrain_lightning.parallel.groups import Groups
from flowtrain_lightning.parallel.halves import HalvedModule, Halves, role_of
from flowtrain_lightning.parallel.random_streams import global_seed, random_states, restore_random_states

FORMAT = 1
META = "meta.pt"
RANDOM_STATES = "random_states.pt"
VALUES = "values.pt"

# ---- saving ---------------------------------------------------------------------------------------------------------


def save_checkpoint(
    checkpoint: dict[str, Any], filepath: Any, halves: Halves, allocation: Allocation, groups: Groups
) -> None:
    """Writes a checkpoint directory. Every rank calls it with its own part.

    Everything goes into a temporary directory beside ``filepath``, is flushed to the disk and takes its name in one
    step. A kill at any moment leaves the former checkpoint whole.

    Args:
        checkpoint: Lightning's checkpoint, with this rank's ``state_dict`` and named ``optimizer_states``.
        filepath: the directory to write; rank 0's counts.
        halves: role -> module paths.
        allocation: recorded, so that a resume can tell whether the layout is the same.
        groups: of this rank.

    Raises:
        FileNotFoundError: a rank does not see the directory: its node has another file system there.
        OSError: on every rank, where one could not write its part; nothing of it is left.
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
    try:
        with written_together(path, cross):
            _save_roles(checkpoint, temporary, halves, allocation, groups)
            if cross.rank == 0:
                _save_rest(checkpoint, states, temporary)
    except OSError:  # of all ranks together
        if cross.rank == 0:
            shutil.rmtree(temporary)
        cross.barrier()
        raise
    if cross.rank == 0:
        take_name(temporary, path)


def _save_roles(
    checkpoint: dict[str, Any], folder: Path, halves: Halves, allocation: Allocation, groups: Groups
) -> None:
    """Writes this rank's part of the halves, and puts in their place what the meta file keeps of them."""
    weights: dict[str, Any] = checkpoint.pop("state_dict")
    optimizers: list[NamedState] | None = checkpoint.pop("optimizer_states", None)
    values: dict[str, dict[str, Any]] = {}
    for role in ROLES:
        if groups.cross.rank in allocation.ranks[role]:
            own = {key: value for key, value in _flat(weights, optimizers or []) if _role_of_key(key, halves) == role}
            save_tensors(folder / role, {key: value for key, value in own.items() if isinstance(value, Tensor)})
            values[role] = {key: value for key, value in own.items() if not isinstance(value, Tensor)}
    if groups.role_rank == 0:
        for role in values:  # behind the last collective: who has no room for it keeps no other rank waiting
            write_file(values[role], folder / role / VALUES)
    checkpoint["state_dict"] = {name: value for name, value in weights.items() if role_of(name, halves) is None}
    checkpoint["flowtrain"] = {
        "format": FORMAT,
        "seed": global_seed(),
        **allocation.state_dict(),
        "halves": {role: list(paths) for role, paths in halves.items()},
        "param_groups": None if optimizers is None else [state["param_groups"] for state in optimizers],
    }


def _save_rest(checkpoint: dict[str, Any], states: list[Any], folder: Path) -> None:
    _save_meta(checkpoint, folder)
    write_file(states, folder / RANDOM_STATES)


def _save_meta(checkpoint: dict[str, Any], folder: Path) -> None:
    write_file(checkpoint, folder / META)
    if objects := get_unsafe_globals_in_checkpoint(folder / META):
        rank_zero_warn(
            f"The checkpoint holds objects that are no tensors or plain data: {', '.join(sorted(objects))}. They come "
            "from hyperparameters, callbacks or `on_save_checkpoint`; to load them, weights_only=False must be given. "
            "Better store their parts as plain data."
        )


# ---- loading --------------------------------------------------------------------------------------------------------


def load_checkpoint(
    filepath: Any,
    halves: Halves,
    allocation: Allocation,
    groups: Groups,
    checkpoint_io: CheckpointIO,
    weights_only: bool | None = None,
    resumes: bool = True,
) -> dict[str, Any]:
    """Reads this rank's part of a checkpoint directory, or a plain Lightning checkpoint with ``checkpoint_io``.

    Args:
        filepath: directory or file.
        halves: role -> module paths.
        allocation: which halves this rank holds.
        groups: of this rank.
        checkpoint_io: reads plain checkpoints.
        weights_only: False allows objects other than tensors and plain data; only for files you trust.
        resumes: training goes on: optimizers are read and this rank's random states restored, if there are any.
    """
    path = Path(filepath)
    if not path.is_dir():
        return checkpoint_io.load_checkpoint(filepath, map_location="cpu", weights_only=weights_only is not False)
    rank = groups.cross.rank
    roles = (None, *(role for role in ROLES if rank in allocation.ranks[role]))
    checkpoint = read_checkpoint(path, lambda name: role_of(name, halves) in roles, weights_only, optimizers=resumes)
    if resumes:
        _tell_differences(checkpoint["flowtrain"], path, allocation)
        states = _load(path / RANDOM_STATES, weights_only=None)
        if rank < len(states):
            restore_random_states(states[rank])
    return checkpoint


def load_half(module: HalvedModule, saved: Mapping[str, Tensor], roles: Collection[str], strict: bool = True) -> None:
    """Loads the weights that live on this rank.

    Args:
        module: takes them.
        saved: name -> value, of this rank's halves at least.
        roles: of this rank.
        strict: whether names that are missing or unknown are an error.

    Raises:
        RuntimeError: the checkpoint is not of this module.
    """
    known = module.state_dict().keys()
    own = {name for name in known if role_of(name, module.halves) in (None, *roles)}
    missing, unknown = sorted(own - saved.keys()), sorted(saved.keys() - known)
    if strict and (missing or unknown):
        raise RuntimeError(
            f"The checkpoint does not fit {type(module).__name__}: missing {missing or 'nothing'}, "
            f"unknown {unknown or 'nothing'}. Build the module as it was saved, or set strict_loading=False."
        )
    module.load_state_dict({name: saved[name] for name in own & saved.keys()}, strict=False)


def read_checkpoint(
    path: Path,
    wanted: Callable[[str], bool] | None = None,
    weights_only: bool | None = None,
    *,
    optimizers: bool = True,
) -> dict[str, Any]:
    """A checkpoint directory as Lightning's dictionary, with optimizer states by parameter name.

    Args:
        path: the directory.
        wanted: says of a parameter or buffer by its name whether it is read; None reads all.
        weights_only: False allows objects other than tensors and plain data; only for files you trust.
        optimizers: whether their states are read.

    Raises:
        ValueError: the directory is no checkpoint of flowtrain, or of a later format, or holds other objects.
    """
    checkpoint = _load_meta(path, weights_only)
    groups = checkpoint["flowtrain"]["param_groups"] if optimizers else None
    states: list[NamedState] = [{"state": {}, "param_groups": group} for group in groups or ()]

    def reads(key: str) -> bool:
        number, name, _ = _parse(key)
        return (number is None or number < len(states)) and (wanted is None or wanted(name))

    for role in checkpoint["flowtrain"]["halves"]:
        values: dict[str, Any] = _load(path / role / VALUES, weights_only)
        own = load_tensors(path / role, reads) | {key: value for key, value in values.items() if reads(key)}
        for key, value in own.items():
            number, name, entry = _parse(key)
            if number is None:
                checkpoint["state_dict"][name] = value
            else:
                states[number]["state"].setdefault(name, {})[entry] = value
    if groups is not None:
        checkpoint["optimizer_states"] = states
    return checkpoint


def read_allocation(path: Path, weights_only: bool | None = None) -> Allocation:
    """The allocation of the run that saved a checkpoint directory.

    Args:
        path: the directory.
        weights_only: False allows objects other than tensors and plain data; only for files you trust.

    Raises:
        ValueError: the directory is no checkpoint of flowtrain, or of a later format, or holds other objects.
    """
    return Allocation.from_state(_load_meta(path, weights_only)["flowtrain"])


def _load_meta(path: Path, weights_only: bool | None) -> dict[str, Any]:
    checkpoint = _load(path / META, weights_only) if (path / META).is_file() else {}
    if "flowtrain" not in checkpoint:
        raise ValueError(f"{path} is a directory without flowtrain's {META}: no checkpoint. Give another path.")
    if checkpoint["flowtrain"]["format"] > FORMAT:
        raise ValueError(
            f"{path} has format {checkpoint['flowtrain']['format']}, but this version of flowtrain reads up to "
            f"{FORMAT}. Update flowtrain-lightning."
        )
    return dict(checkpoint)


def _load(path: Path, weights_only: bool | None) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=weights_only is not False)
    except pickle.UnpicklingError as error:
        found = re.search(r"GLOBAL (\S+)", str(error))
        raise ValueError(
            f"{path} holds objects that are no tensors or plain data ({found[1] if found else error}), and reading "
            "them may run code. Pass weights_only=False (on the command line: --weights_only false) if you trust the "
            "file."
        ) from error


def _tell_differences(saved: Mapping[str, Any], path: Path, allocation: Allocation) -> None:
    if saved["seed"] != global_seed():
        rank_zero_warn(
            f"{path} was made with seed {saved['seed']}, but this run has {global_seed()}: dropout and other random "
            f"draws differ from those of an uninterrupted run. Call seed_everything({saved['seed']}) to go on alike."
        )
    if saved["ranks"] != {role: list(ranks) for role, ranks in allocation.ranks.items()}:
        rank_zero_info(
            f"flowtrain: {path} was saved on another allocation ({Allocation.from_state(saved).describe()}). The run "
            "goes on with the same samples; sums in another order differ in their last bits."
        )


# ---- names of what is saved -----------------------------------------------------------------------------------------


def _flat(weights: Mapping[str, Any], optimizers: list[NamedState]) -> Iterator[tuple[str, Any]]:
    """``weights.NAME`` and ``optimizer.NUMBER.NAME#ENTRY``, each with its value."""
    for name, value in weights.items():
        yield f"weights.{name}", value
    for number, optimizer in enumerate(optimizers):
        for name, entries in optimizer["state"].items():
            for entry, value in entries.items():
                yield f"optimizer.{number}.{name}#{entry}", value


def _parse(key: str) -> tuple[int | None, str, str]:
    """The optimizer's number (None: a weight), the parameter's name and the entry of its state."""
    kind, _, rest = key.partition(".")
    if kind == "weights":
        return None, rest, ""
    number, _, rest = rest.partition(".")
    name, _, entry = rest.rpartition("#")
    return int(number), name, entry


def _role_of_key(key: str, halves: Halves) -> str | None:
    return role_of(_parse(key)[1], halves)
