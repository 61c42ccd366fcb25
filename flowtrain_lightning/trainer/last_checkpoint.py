"""Finds the checkpoint that ``ckpt_path="last"`` means: the newest of this module and data, the same on all ranks.

Plain Lightning looks into the folder of this very start, which is a new ``version_N`` each time. Here it is sought
below ``default_root_dir``, and wherever the checkpoint callbacks and the first logger write.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from flowtrain_lightning.checkpoint.digest import digest_of
from flowtrain_lightning.checkpoint.files import appears_here
from flowtrain_lightning.checkpoint.index_file import INDEX
from flowtrain_lightning.checkpoint.summary import CheckpointSummary, checkpoints_below
from flowtrain_lightning.data import FlowDataModule
from flowtrain_lightning.module import FlowModule
from flowtrain_lightning.packing_check import detached_copy
from flowtrain_lightning.parallel.deepspeed.deepspeed_partition import held_state
from flowtrain_lightning.parallel.halves import build_halves, role_of
from flowtrain_lightning.parallel.ranks.cross_group import AgreedError, CrossGroup

LAST = "last"

_TOLD = 4  # checkpoints that a refusal names
_NAMES = 3  # weights that it names of each
_TAIL_BYTES = 1 << 16  # of a plain file: its end lists the digests of its parts


class LastCheckpointError(MisconfigurationException, AgreedError):
    """``ckpt_path="last"`` was given, and there are checkpoints, but none that all ranks can go on from."""

    rank = 0


class LastCheckpoint(os.PathLike[str]):
    """Stands for ``"last"`` from the call of ``fit`` on, and is the path once all ranks have agreed on it.

    Lightning asks for a path before there are groups, data and weights to choose by, but only looks whether it is true,
    and first reads it when all is set up. It is false where there is no checkpoint.

    Args:
        weights_only: what ``fit`` or its like was told about reading its checkpoint.
    """

    def __init__(self, weights_only: bool | None = None) -> None:
        self._weights_only = weights_only
        self._settled = False
        self._path: Path | None = None
        self._trainer: L.Trainer | None = None

    def __bool__(self) -> bool:
        return self._path is not None or not self._settled

    def __fspath__(self) -> str:
        return LAST if self._path is None else str(self._path)

    def __str__(self) -> str:
        return self.__fspath__()

    def expected(self, trainer: L.Trainer) -> str | None:
        """The path as far as rank 0 can tell before roles are assigned, to keep the allocation it was saved on."""
        self._trainer = trainer
        module, data = trainer.lightning_module, trainer.datamodule  # type: ignore[attr-defined]
        assert isinstance(module, FlowModule), "others are refused before"
        try:
            if not any(True for _ in module.parameters()):
                module = detached_copy(module)
                build_halves(module, ())
            if isinstance(data, FlowDataModule):
                data = data.apart()
                if type(data).prepare_data is not FlowDataModule.prepare_data:
                    data.prepare_data()  # of a subclass: it may make the files
            chosen, _ = self._choose(module, data)
        except Exception:  # of the user's files or module: they are met again, where they are told
            return None
        return None if chosen is None else str(chosen.path)

    def settle(self, trainer: L.Trainer, cross: CrossGroup) -> None:
        """Chooses the path, alike on all ranks, and says which. Every rank calls it, with halves and data in place.

        Raises:
            LastCheckpointError: there are checkpoints, but none fits, or not all ranks see the one that does.
        """
        self._trainer = trainer
        path, told, refusal = cross.broadcast_message(self._outcome() if cross.rank == 0 else None, 0)
        if refusal is not None:
            raise LastCheckpointError(refusal)
        if path is not None:
            refuse_unlike_ranks(path, cross)
        self._path, self._settled = path, True
        for sentence in told:
            rank_zero_info(f"flowtrain: {sentence}")
        if path is None and not self._fits:
            rank_zero_warn(f'ckpt_path="{LAST}" finds no checkpoint, so the weights stay as they are.')

    @property
    def _fits(self) -> bool:
        assert self._trainer is not None
        return self._trainer.state.fn == TrainerFn.FITTING

    @cached_property
    def _folders(self) -> list[Path]:
        assert self._trainer is not None
        return search_folders(self._trainer)

    @cached_property
    def _found(self) -> list[CheckpointSummary]:
        return checkpoints_below(self._folders, self._weights_only)

    def _outcome(self) -> tuple[Path | None, list[str], str | None]:
        """On rank 0: the path, if there is one; what to log; and why all ranks must end, if they must."""
        assert self._trainer is not None
        module = self._trainer.lightning_module
        assert isinstance(module, FlowModule), "others are refused before"
        chosen, others = self._choose(module, self._trainer.datamodule)  # type: ignore[attr-defined]
        below = ", ".join(map(str, self._folders))
        if chosen is not None:
            place = f"{chosen.path}, saved after step {chosen.step} in epoch {chosen.epoch}"
            told = [f"passes over {other.path}, which is newer: {reason}." for other, reason in others]
            return chosen.path.absolute(), [f'ckpt_path="{LAST}" is {place}.', *told], None
        if not others:
            begins = "training begins from the start" if self._fits else "the weights stay as they are"
            return None, [f'ckpt_path="{LAST}": there is no checkpoint below {below}, so {begins}.'], None
        reasons = [f"  {other.path}, step {other.step}: {reason}." for other, reason in others[:_TOLD]]
        more = [f"  and {len(others) - _TOLD} older ones."] if len(others) > _TOLD else []
        refusal = [f'ckpt_path="{LAST}" was given, but no checkpoint below {below} fits this run:', *reasons, *more]
        advice = (
            "Pass the path of the one that is meant, give each run a folder of its own, Trainer(default_root_dir=...), "
            "or leave ckpt_path out to begin anew."
        )
        return None, [], "\n".join([*refusal, advice])

    def _choose(
        self, module: FlowModule, data: Any
    ) -> tuple[CheckpointSummary | None, list[tuple[CheckpointSummary, str]]]:
        """The newest checkpoint that fits and is whole, and those before it with the reason why they are not it."""
        others: list[tuple[CheckpointSummary, str]] = []
        own = held_state(module)
        for summary in self._found:
            reason = summary.fault or _other_module(summary, module, own)
            if reason is None and self._fits:
                reason = _other_data(summary, data)
            reason = reason or summary.damage()
            if reason is None:
                return summary, others
            others.append((summary, reason))
        return None, others


def search_folders(trainer: L.Trainer) -> list[Path]:
    """Returns folders in which checkpoints of this run's starts may lie; without URLs, which ``fit`` refuses."""
    named: list[Any] = [trainer.default_root_dir]
    callbacks = trainer.checkpoint_callbacks  # type: ignore[attr-defined]
    named += [getattr(callback, "dirpath", None) for callback in callbacks]
    if callbacks and trainer.loggers and trainer.loggers[0].save_dir is not None:
        # Where ModelCheckpoint saves if it is given no folder: here in a folder of each start.
        named.append(Path(trainer.loggers[0].save_dir) / str(trainer.loggers[0].name))
    folders = [Path(os.path.abspath(folder)) for folder in named if folder and "://" not in str(folder)]
    unique = list(dict.fromkeys(folders))
    return [each for each in unique if not any(each != other and each.is_relative_to(other) for other in unique)]


def _other_module(summary: CheckpointSummary, module: FlowModule, own: Mapping[str, Any]) -> str | None:
    """Why a checkpoint is not of this module; None where it is."""
    kind = type(module).__qualname__
    if summary.module not in (None, kind):
        return f"it is of {summary.module}, and this module is {kind}"
    shapes = {name: tuple(value.shape) for name, value in own.items() if hasattr(value, "shape")}
    saved = summary.weights
    other = [name for name in sorted(saved.keys() & shapes.keys()) if saved[name] != shapes[name]]
    if other:
        return "; ".join(f"{name} is {saved[name]} there, and {shapes[name]} here" for name in other[:_NAMES])
    if not module.strict_loading:
        return None if saved.keys() & shapes.keys() else "it has no weight of this module"
    missing = {name for name in shapes if role_of(name, module.halves) is not None} - saved.keys()
    unknown = saved.keys() - own.keys()
    if (missing and summary.names_all) or unknown:
        return f"it lacks {_listed(missing)} of {kind}, and has besides {_listed(unknown)}"
    return None


def _other_data(summary: CheckpointSummary, data: Any) -> str | None:
    """Why training cannot go on from a checkpoint on these data; None where it can."""
    if "optimizer_states" not in summary.lightning and summary.holds_all:
        return "it holds weights alone, without the optimizer"
    if not isinstance(data, FlowDataModule):
        return None  # the loader that was given instead refuses another position when it is loaded
    position = summary.lightning.get(type(data).__qualname__)
    if position is None:
        return None if not summary.holds_all else f"it holds no position in the data of {type(data).__qualname__}"
    differences = data.differences(position)
    return f"its position in the data means other samples: {differences}" if differences else None


def _listed(names: Iterable[str]) -> str:
    known = sorted(names)
    rest = f" and {len(known) - _NAMES} more" if len(known) > _NAMES else ""
    return f"{', '.join(known[:_NAMES])}{rest}" if known else "nothing"


def refuse_unlike_ranks(path: Path, cross: CrossGroup) -> None:
    """Raises on every rank where one finds no checkpoint, or another one, where rank 0 has found it.

    Raises:
        LastCheckpointError: names the ranks.
    """
    marks = cross.gather_messages(_mark(path))
    unlike = [rank for rank, mark in enumerate(marks) if mark != marks[0]]
    if unlike:
        raise LastCheckpointError(
            f'ckpt_path="{LAST}" is {path} on rank 0, but {"rank" if len(unlike) == 1 else "ranks"} '
            f"{', '.join(map(str, unlike))} {'finds' if len(unlike) == 1 else 'find'} none or another one there. Name "
            "a folder on a file system that all nodes share: Trainer(default_root_dir=...), or "
            "ModelCheckpoint(dirpath=...)."
        )


def _mark(path: Path) -> str | None:
    """Tells a checkpoint from every other one; None where there is none."""
    if not path.is_file() and not appears_here(path):
        return None
    file = path / INDEX if path.is_dir() else path
    with file.open("rb") as opened:
        if not path.is_dir():
            opened.seek(max(file.stat().st_size - _TAIL_BYTES, 0))
        return digest_of(opened.read(_TAIL_BYTES))
