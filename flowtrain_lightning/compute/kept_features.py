"""Features of a frozen encoder that are kept: what is there is taken, what is encoded is written meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flowtrain_lightning.compute.encoder_fingerprint import WeightsState, weights_state
from flowtrain_lightning.compute.kept_worth import KeptWorth
from flowtrain_lightning.data import FeatureStore, PackedMedia
from flowtrain_lightning.data.loading.workers import fork_lock
from flowtrain_lightning.parallel.halves import HalvedModule
from flowtrain_lightning.parallel.ranks.random_streams import random_states

_log = logging.getLogger("lightning.pytorch")  # whose messages of ranks other than 0 are shown, too

_WAITING = 64
"""Media items at most whose features wait to be written; then the encoder waits for the disk."""

Encode = Callable[[PackedMedia], tuple[Tensor, ...]]


class KeptFeatures:
    """Takes features out of one rank's stores, and puts what was encoded into them.

    Args:
        module: the user's.
    """

    def __init__(self, module: HalvedModule) -> None:
        self._module = module
        self._states: dict[FeatureStore, WeightsState] = {}
        self._given_up: set[FeatureStore] = set()
        self._thread: ThreadPoolExecutor | None = None
        self._writing: list[Future[None]] = []
        self._worth: dict[str, KeptWorth] = {}

    def features(
        self, role: str, media: PackedMedia, enter: Callable[[], None], encode: Encode, device: torch.device
    ) -> tuple[Tensor, ...]:
        """The features of an encoder batch, of which some may be kept.

        Args:
            role: whose encoder it is.
            media: the encoder batch.
            enter: begins the random stream in which it is encoded.
            encode: the features of those media items that are not kept.
            device: on which the features are wanted.

        Raises:
            RuntimeError: the encoder trains, or its weights are others than those of the features that are kept; or
                features follow from weights of another half, which train.
        """
        kept = media.kept
        assert kept is not None
        self._refuse_changes(role, kept.store)
        found, worth = list(kept.features), self._worth.setdefault(role, KeptWorth())
        worth.read(kept)
        made: tuple[Tensor, ...] = ()
        if missing := kept.missing:
            enter()
            before, begin = random_states(), worth.now(device)
            made = encode(replace(media, kept=None))
            self._refuse_graph(role, made)
            worth.encoded(len(missing), begin, worth.now(device))
            parts = list(zip(*(torch.split(each, list(media.rows)) for each in made), strict=True))
            if _differ(before, random_states()):
                self._give_up(role, kept.store, "it draws random numbers; put its dropout into evaluation mode")
            for place, part in zip(missing, parts, strict=True):
                found[place] = part
                self._keep(role, kept.store, kept.items[place], part)
        if len(missing) == len(found):
            return made
        given = [[each.to(device, non_blocking=True) for each in part] for part in found if part is not None]
        return tuple(torch.cat(levels) for levels in zip(*given, strict=True))

    def flush(self) -> None:
        """Waits until all that was encoded is written: other ranks may read it in the next epoch.

        Says once whether keeping features pays.
        """
        for each in self._writing:
            each.result()
        self._writing.clear()
        for role, worth in self._worth.items():
            worth.tell(role)

    def _refuse_changes(self, role: str, store: FeatureStore) -> None:
        state = weights_state(self._module, role)
        half = (self._module.get_submodule(path) for path in self._module.halves[role])
        trains = any(weight.requires_grad for each in half for weight in each.parameters())
        if trains or self._states.setdefault(store, state) != state:
            change = "began to train" if trains else "got other weights"
            raise RuntimeError(
                f"The {role} {change} within an epoch in which its features are kept, so features of now and of before "
                "would be mixed. Change it in `on_train_epoch_start`, or leave FlowDataModule(keep_features=...) out."
            )

    def _refuse_graph(self, role: str, made: tuple[Tensor, ...]) -> None:
        if any(feature.requires_grad for feature in made):
            raise RuntimeError(
                f"The {role} is frozen, but `encode` computes with weights that train, of another half, so features "
                "change with every step. Use those weights in `merge`, or leave FlowDataModule(keep_features=...) out."
            )

    def _keep(self, role: str, store: FeatureStore, item: str, features: tuple[Tensor, ...]) -> None:
        if store in self._given_up:
            return
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="keep features")
        if len(self._writing) >= _WAITING:
            self._writing.pop(0).result()
        # Copies: whoever gets the features may write into them.
        copies = [feature.detach().clone() for feature in features]
        ready: Any = torch.cuda.Event() if copies[0].is_cuda else None  # type: ignore[no-untyped-call]
        if ready is not None:
            ready.record()
        self._writing.append(self._thread.submit(self._write, role, store, item, copies, ready))

    def _write(self, role: str, store: FeatureStore, item: str, features: list[Tensor], ready: Any) -> None:
        if store in self._given_up:
            return
        if ready is not None:
            ready.synchronize()
        try:
            with fork_lock.loading():
                fits = store.write(item, [feature.cpu() for feature in features])
        except Exception as error:  # whatever a disk or a format has: training does not need it
            self._give_up(role, store, str(error))
        else:
            if not fits:
                self._give_up(role, store, f"most_bytes={store.most_bytes:,} of KeepFeatures are taken")

    def _give_up(self, role: str, store: FeatureStore, reason: str) -> None:
        if store not in self._given_up:
            self._given_up.add(store)
            _log.warning(
                f"flowtrain: from here on no more features of the {role} are kept in {store.folder}: {reason}. "
                "Training goes on; what is kept already is read."
            )


def _differ(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Whether random numbers were drawn between two states."""
    pairs = [(before[name], after[name]) for name in before]
    return any(not torch.equal(one, other) if isinstance(one, Tensor) else one != other for one, other in pairs)
