"""The stores in which a run keeps the features of its encoders, and what the log says of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Protocol

from flowtrain_lightning.data.batch import PackedMedia, RankShard
from flowtrain_lightning.data.features.feature_store import FeaturesNotKept, FeatureStore, KeepFeatures
from flowtrain_lightning.data.features.written_code import code_of
from flowtrain_lightning.data.fingerprint import fingerprint

_log = logging.getLogger("lightning.pytorch")  # whose messages of ranks other than 0 are shown, too


class MediaProcessor(Protocol):
    """Makes of media what an encoder sees."""

    @property
    def fingerprint(self) -> str:
        """Changes with anything that changes what it makes."""


def refuse_augmented(owner: str) -> None:
    """Raises a ValueError: features are to be kept of pictures that augmentation changes."""
    raise ValueError(
        f"{owner} got keep_features and augment, but augmentation changes pictures by chance in every epoch, "
        "so none of their features could be used again; leave one of the two out."
    )


def keeping_of(
    settings: KeepFeatures | None, module: object | None, shard: RankShard, processors: Iterable[MediaProcessor | None]
) -> FeatureKeeping | None:
    """How a rank keeps features; None where none are kept, or no model says what its features follow from.

    Args:
        settings: where, if at all.
        module: the model that is trained.
        shard: what this rank loads.
        processors: of media.
    """
    fingerprint_of = getattr(module, "encoder_fingerprint", None)
    if settings is None or fingerprint_of is None:
        return None
    read = [
        (*code_of([type(each)]), type(each).__qualname__, each.fingerprint) for each in processors if each is not None
    ]
    return FeatureKeeping(settings, fingerprint(read), shard, fingerprint_of)


@dataclass
class FeatureKeeping:
    """The stores of one rank's encoders.

    It is asked at the beginning of every epoch, since a callback may have changed what trains.

    Attributes:
        settings: where features are kept.
        processors: name of all that becomes of a file before the encoder sees it.
        shard: what this rank loads.
        fingerprint_of: role -> name of all else that its features follow from; raises `FeaturesNotKept`.
        kept: media items whose features were read in the epoch that runs.
        encoded: media items of it that were to be encoded.
        nbytes: bytes that were read.
        seconds: that it took to read them.
    """

    settings: KeepFeatures
    processors: str
    shard: RankShard
    fingerprint_of: Callable[[str], str]
    kept: int = 0
    encoded: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    _told: set[str] = field(default_factory=set)

    def stores(self) -> dict[str, FeatureStore]:
        """Role of this rank -> where its features are kept; without the roles whose features are not."""
        self.kept = self.encoded = self.nbytes = 0
        self.seconds = 0.0
        found = {}
        for role in self.shard.encodes:
            try:
                if self.shard.members.meeting(role).binds:
                    raise FeaturesNotKept(
                        "its ranks need each other in their passes, so none of them could leave one out. Give them "
                        f"whole copies: FlowTrainStrategy(roles={{{role!r}: {{}}}})"
                    )
                store = found[role] = self.settings.store(fingerprint([self.fingerprint_of(role), self.processors]))
                used = store.open()
            except FeaturesNotKept as reason:
                self._tell(f"flowtrain: features of the {role} are not kept: {reason}")
            except OSError as error:
                self._tell(f"flowtrain: features of the {role} can be read at most, as their folder says: {error}")
            else:
                self._tell(
                    f"flowtrain: features of the {role} are kept in {store.folder / store.name}",
                    f"; all that is kept in {store.folder} takes {used:,} of at most {store.most_bytes:,} bytes",
                )
        return found

    def count(self, batches: Mapping[str, tuple[PackedMedia | None, ...]]) -> None:
        """Counts what a step reads and what it encodes."""
        for media in chain(*batches.values()):
            if media is not None:
                missing = len(media.rows)
                self.encoded += missing
                if media.kept is not None:
                    self.kept += len(media.kept.items) - missing
                    self.nbytes += media.kept.nbytes
                    self.seconds += media.kept.seconds

    def end_epoch(self) -> None:
        """Says how much was read, and what to do where nothing is left to encode."""
        if not self.kept:
            return
        idle = self.shard.members.trunk not in self.shard.own and not self.encoded
        advice = (
            ". This rank only encodes, so it has nothing left to do: with FlowTrainStrategy(placement='colocated'), or "
            "strategy='ddp', it trains the backbone as well; `flowtrain plan --freeze encoder` names the best layout"
        )
        self._tell(
            f"flowtrain: of {self.kept + self.encoded:,} media items of the epoch {self.kept:,} were read from where "
            f"features are kept, and {self.encoded:,} encoded{advice if idle else ''}",
            f". {self.nbytes:,} bytes were read at {self.nbytes / max(self.seconds, 1e-9) / 1e6:,.0f} MB/s",
        )

    def _tell(self, sentence: str, once: str = "") -> None:
        """Says a sentence that was not said yet, and what belonged to it when it was."""
        if sentence not in self._told:
            self._told.add(sentence)
            _log.info(f"{sentence}{once}.")
