"""Lightning's loop progress in a checkpoint: epochs that are over, and those that ``fit`` left in their middle.

Where ``max_steps``, ``max_time`` or ``trainer.should_stop`` ends ``fit`` in mid-epoch, Lightning counts the epoch as
processed all the same. A run that went on from there would skip the rest of the epoch's samples, and begin the next
epoch at the number of the batch with which the former one stopped. With ``max_steps`` it does the latter after whole
epochs, too; and where it cannot foresee an epoch's last batch, after a save in the hook of that batch.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

_EPOCHS = "epoch_progress"
_BATCHES = "epoch_loop.batch_progress"
_EPOCH_LOOP = "epoch_loop.state_dict"
_STEPPED = "_batches_that_stepped"


def ended_in_mid_epoch(fit_loop: Mapping[str, Any]) -> bool:
    """Whether ``fit`` had ended, or was about to, with batches of the epoch left.

    Args:
        fit_loop: the state of Lightning's ``trainer.fit_loop``.
    """
    if _EPOCHS not in fit_loop or _BATCHES not in fit_loop:
        return False
    epochs, batches = fit_loop[_EPOCHS]["current"], fit_loop[_BATCHES]
    counts_as_processed = 0 < epochs["started"] == epochs["ready"] == epochs["processed"]
    between_batches = 0 < batches["current"]["completed"] == batches["current"]["ready"]
    return counts_as_processed and between_batches and not batches["is_last_batch"]


def is_between_epochs(fit_loop: Mapping[str, Any]) -> bool:
    """Whether an epoch is over, down to its last batch, and the next one has not begun.

    Args:
        fit_loop: the state of Lightning's ``trainer.fit_loop``.
    """
    if _EPOCHS not in fit_loop or _BATCHES not in fit_loop:
        return False
    epochs, batches = fit_loop[_EPOCHS]["current"], fit_loop[_BATCHES]
    # A batch whose last hook saved is not complete: Lightning itself knows what to do then.
    complete = 0 < batches["current"]["completed"] == batches["current"]["ready"]
    return bool(complete and batches["is_last_batch"] and 0 < epochs["started"] == epochs["processed"])


def is_at_last_batch(fit_loop: Mapping[str, Any]) -> bool:
    """Whether an epoch counts as over of whose last batch ``on_train_batch_end`` has saved.

    Args:
        fit_loop: the state of Lightning's ``trainer.fit_loop``, which has begun to go on from there.
    """
    epochs, batches = fit_loop[_EPOCHS]["current"], fit_loop[_BATCHES]
    in_last_hook = 0 < batches["current"]["completed"] + 1 == batches["current"]["ready"]
    return bool(in_last_hook and batches["is_last_batch"] and 0 < epochs["started"] == epochs["processed"])


def with_batch_counted(epoch_loop: Mapping[str, Any]) -> dict[str, Any]:
    """What Lightning's epoch loop saves beside its progress, with a batch more, under whose number loggers log.

    Args:
        epoch_loop: of ``trainer.fit_loop.epoch_loop.on_save_checkpoint()``.
    """
    return {**epoch_loop, _STEPPED: epoch_loop[_STEPPED] + 1}


def settled_progress(fit_loop: Mapping[str, Any]) -> dict[str, Any]:
    """The progress from which Lightning goes on with the very next batch.

    An epoch that was left in its middle is as in a save in ``on_train_batch_end`` of its last batch: from there
    Lightning repeats neither the batch nor a validation that has followed it. An epoch that is over is complete,
    whichever hook saved it.

    Args:
        fit_loop: the state of Lightning's ``trainer.fit_loop``; it stays as it is.
    """
    changed = copy.deepcopy(dict(fit_loop))
    if is_between_epochs(fit_loop):
        for epochs in changed[_EPOCHS].values():
            epochs["ready"] = epochs["completed"] = epochs["processed"]
    if not ended_in_mid_epoch(fit_loop):
        return changed
    for counts in ("total", "current"):
        epochs, batches = changed[_EPOCHS][counts], changed[_BATCHES][counts]
        epochs["processed"] = epochs["completed"] = epochs["started"] - 1
        batches["completed"] -= 1
    changed[_EPOCH_LOOP][_STEPPED] -= 1  # Lightning counts the batch when it goes on
    return changed


def with_settled_progress(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """Lightning's checkpoint with its :func:`settled_progress`, in place."""
    loops = checkpoint.get("loops")
    if loops and "fit_loop" in loops:
        checkpoint["loops"] = {**loops, "fit_loop": settled_progress(loops["fit_loop"])}
    return checkpoint
