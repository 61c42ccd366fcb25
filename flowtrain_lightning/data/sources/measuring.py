"""Measuring records: tokens, targets, and the patches and rows of their media."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flowtrain_lightning.data.data_error import DataError
from flowtrain_lightning.data.fingerprint import fingerprint
from flowtrain_lightning.data.media.audio_files import decode_samples, read_audio_header
from flowtrain_lightning.data.media.audio_processor import AudioProcessor
from flowtrain_lightning.data.media.image_files import decode, read_header
from flowtrain_lightning.data.media.image_processor import ImageProcessor
from flowtrain_lightning.data.media.loaded_media import OwnMedia
from flowtrain_lightning.data.media.media_content import content_numbers
from flowtrain_lightning.data.media.media_files import (
    AudioFile,
    MediaAddress,
    MediaError,
    NamedMedia,
    VideoFile,
    file_of,
    kind_of,
)
from flowtrain_lightning.data.media.media_status import MediaStatus
from flowtrain_lightning.data.media.video_files import decode_frames, read_video_header
from flowtrain_lightning.data.media.video_processor import VideoProcessor
from flowtrain_lightning.data.records.columns import Columns
from flowtrain_lightning.data.records.conversation import Template, TokenSequence
from flowtrain_lightning.data.records.formats import Record
from flowtrain_lightning.data.records.sample_tokens import token_sequence
from flowtrain_lightning.data.records.tokenization import Tokenizer
from flowtrain_lightning.packing import AUDIO, IMAGE, IntArray, NameArray, SampleSizes
from flowtrain_lightning.packing.role_graph import GENERATED

Unreadable = Literal["error", "drop"]

_FORMAT = 9


@dataclass(frozen=True)
class Measure:
    """The settings that decide a record's sizes.

    Attributes:
        tokenizer: makes ids of text.
        template: how a conversation is written.
        images: how large an image becomes.
        unreadable: ``"error"`` reads only the headers of media and stops at one that cannot be used; ``"drop"``
            decodes each media item as it will be used, and marks such records.
        prompt: measure what ``predict`` reads.
        videos: which frames of a video are taken and how large they become; None: records may have no videos.
        protocols: kinds of addresses that records may name beside those that any may, see `MediaAddress`.
        ignored: fields of records that are as if they were not there.
        columns: which fields hold a question and an answer, where records have none of the usual forms.
        condition_rows: places that an image to be generated has among the tokens; None: records may have none.
        audio: the frames that a clip of audio becomes; None: records may have no audio.
    """

    tokenizer: Tokenizer
    template: Template
    images: ImageProcessor
    unreadable: Unreadable
    prompt: bool
    videos: VideoProcessor | None = None
    protocols: frozenset[str] = frozenset()
    ignored: frozenset[str] = frozenset()
    columns: Columns | None = None
    condition_rows: int | None = None
    audio: AudioProcessor | None = None

    @property
    def fingerprint(self) -> str:
        """Changes with anything that may change a size."""
        videos = None if self.videos is None else self.videos.fingerprint
        rule = [
            self.template.fingerprint,
            self.images.fingerprint,
            videos,
            self.unreadable,
            self.prompt,
            sorted(self.protocols),
            sorted(self.ignored),
        ]
        rule += [] if self.audio is None else [f"audio {self.audio.fingerprint}"]
        rule += [] if self.columns is None else [repr(self.columns)]
        rule += [] if self.condition_rows is None else [f"condition rows {self.condition_rows}"]
        return fingerprint([_FORMAT, self.tokenizer.fingerprint, rule])

    def reaching(self, record: Record) -> Record:
        """The record with its addresses as far as they may be opened."""
        if not self.protocols or not any(isinstance(file_of(item), MediaAddress) for item in record.files):
            return record
        return replace(record, media=tuple(_reaching(item, self.protocols) for item in record.media))

    def sequence(self, record: Record, rows: IntArray) -> TokenSequence:
        """The tokens and labels of a record whose media have so many rows of features."""
        return token_sequence(record, self.template, self.tokenizer, rows, prompt=self.prompt, videos=self.videos)


def _reaching(item: NamedMedia | OwnMedia, protocols: frozenset[str]) -> NamedMedia | OwnMedia:
    if isinstance(item, VideoFile | AudioFile) and isinstance(item.file, MediaAddress):
        return replace(item, file=replace(item.file, named=protocols))
    return replace(item, named=protocols) if isinstance(item, MediaAddress) else item


class MeasuredMedia(NamedTuple):
    """A record's media.

    Attributes:
        patches: ``[media items]`` patches of each.
        rows: ``[media items]`` rows of features of each.
        usable: all of them can be used; else they are left out here.
        animated: how many are animated images.
        status: their files.
        content: ``[media items]`` equal numbers for equal media items, see `SampleSizes`.
        parts: ``[media items]`` moments of a clip, tiles of a picture, else 1.
        modality: ``[media items]`` of each; `GENERATED` where it is to be generated.
    """

    patches: IntArray
    rows: IntArray
    usable: bool
    animated: int
    status: MediaStatus
    content: IntArray
    parts: IntArray
    modality: NameArray

    @classmethod
    def none(cls, *, usable: bool) -> MeasuredMedia:
        """That of a record without media, or of one whose media cannot be used."""
        nothing = np.empty(0, np.int64)
        return cls(nothing, nothing, usable, 0, MediaStatus.none(), nothing, nothing, nothing.astype(str))


class _Size(NamedTuple):
    """The patches and the rows of features of one media item, whether it is an animated image, and its parts."""

    patches: int
    rows: int
    animated: bool = False
    parts: int = 1


class MeasuredRecords(NamedTuple):
    """Records that follow each other.

    Attributes:
        usable: ``[records]`` False where a media item cannot be used; the sizes are then 0.
        sizes: the sizes of all records.
        animated: images that are animated.
        status: the files of all media items.
    """

    usable: NDArray[np.bool_]
    sizes: SampleSizes
    animated: int
    status: MediaStatus


def measured_media(record: Record, measure: Measure, folder: Path = Path()) -> MeasuredMedia:
    """The sizes of a record's media.

    Args:
        record: the record.
        measure: what decides the sizes.
        folder: of the data, to which the names of files are relative.

    Raises:
        DataError: one cannot be used, and such records are not to be left out.
    """
    sizes = []
    # Taken before reading: what is rewritten meanwhile is refused when it is loaded.
    status = MediaStatus.of(record.files, folder)
    for number, item in enumerate(record.files):
        try:
            size = _measured(item, record, measure)
            sizes.append(size if number not in record.generated else _to_generate(size, record, measure))
        except MediaError as error:
            if measure.unreadable == "drop":
                return MeasuredMedia.none(usable=False)
            raise unusable(item, record, error) from error
    table = np.asarray(sizes, np.int64).reshape(-1, 4)
    content = content_numbers(record.files, status, alone=len(record.media) == 1)
    generated = np.isin(np.arange(len(table)), [*record.generated])
    content[generated] = -1  # what is generated twice has two conditions
    heard = [isinstance(item, AudioFile) for item in record.files]
    modality = np.where(generated, GENERATED, np.where(heard, AUDIO, IMAGE))
    patches, rows, animated, parts = table.T
    return MeasuredMedia(patches, rows, True, int(animated.sum()), status, content, parts, modality)


def unusable(item: NamedMedia | OwnMedia, record: Record, error: MediaError) -> DataError:
    """Says why a media item cannot be used."""
    return DataError(
        f"{record.where}: {kind_of(item)} {item} cannot be used: {error}; correct the record, or leave such "
        "records out with IndexConfig(unreadable='drop')."
    )


def _to_generate(size: _Size, record: Record, measure: Measure) -> _Size:
    """The size of an image that is to be generated: it has a fixed number of places among the tokens."""
    if measure.condition_rows is None:
        raise DataError(
            f"{record.where}: it has an image to be generated, but the model that is trained has no half that "
            "generates. Name one in its `halves`, 'generator', or take \"generate\" out of the record."
        )
    return size._replace(rows=measure.condition_rows, parts=1)


def _measured(item: NamedMedia, record: Record, measure: Measure) -> _Size:
    if isinstance(item, VideoFile):
        return _measured_video(item, record, measure)
    if isinstance(item, AudioFile):
        return _measured_audio(item, record, measure)
    header = read_header(item)
    size = header.height, header.width
    grid = measure.images.size(*size, alone=len(record.media) == 1)
    if measure.unreadable == "drop":
        decode(item)
    rows, parts = measure.images.rows_of_features(grid, size), measure.images.tiles_in(grid, size)
    return _Size(math.prod(grid), rows, header.animated, parts)


def _measured_video(video: VideoFile, record: Record, measure: Measure) -> _Size:
    if measure.videos is None:
        raise DataError(
            f"{record.where}: it has a video, but nothing says what becomes of videos. Train a model that takes them "
            "(Qwen2-VL, Qwen2.5-VL or Qwen3-VL), or give FlowDataModule(videos=VideoProcessor(...)) to one of your own."
        )
    sampled = measure.videos.sample(read_video_header(video))
    if measure.unreadable == "drop":
        for _ in decode_frames(video, sampled.frames):
            pass
    rows = measure.videos.rows_of_features(sampled)
    return _Size(sampled.patches, rows, parts=sampled.clip.moments)


def _measured_audio(audio: AudioFile, record: Record, measure: Measure) -> _Size:
    if measure.audio is None:
        raise DataError(
            f"{record.where}: it has audio, but nothing says what becomes of audio. Train a model that hears, or give "
            "FlowDataModule(audio=AudioProcessor(...)) to one of your own."
        )
    samples = measure.audio.samples(read_audio_header(audio))
    if measure.unreadable == "drop":
        decode_samples(audio)
    return _Size(measure.audio.frames(samples), measure.audio.rows_of_features(samples))


def measure_records(
    records: Sequence[Record], measure: Measure, threads: Executor, folder: Path = Path()
) -> MeasuredRecords:
    """The sizes of records.

    Args:
        records: the records.
        measure: what decides the sizes.
        threads: which hide the latency of opening media; tokenizers need not be safe in threads.
        folder: of the data, to which the names of files are relative.

    Raises:
        DataError: a record or (unless left out) a media item cannot be used.
    """
    records = [measure.reaching(record) for record in records]
    with_media = threads.map(lambda record: measured_media(record, measure, folder), [r for r in records if r.media])
    nothing = np.empty(0, np.int64)
    usable, columns, rows, patches, content, parts = [], [], [nothing], [nothing], [nothing], [nothing]
    modality = [nothing.astype(str)]
    animated, status = 0, []
    for record in records:
        media = next(with_media) if record.media else MeasuredMedia.none(usable=True)
        tokens = targets = items = 0
        if media.usable:
            sequence = measure.sequence(record, media.rows)
            tokens, targets, items = len(sequence), sequence.targets, len(sequence.media_rows)
            animated += media.animated
        usable.append(media.usable)
        columns.append((tokens, targets, items))
        rows.append(media.rows[:items])
        patches.append(media.patches[:items])
        content.append(media.content[:items])
        parts.append(media.parts[:items])
        modality.append(media.modality[:items])
        status.append(media.status.first(items))
    table = np.asarray(columns, dtype=np.int64).reshape(-1, 3).T.copy()
    named = np.concatenate(modality)
    sizes = SampleSizes(
        tokens=table[0],
        targets=table[1],
        media_start=np.concatenate([[0], np.cumsum(table[2])]).astype(np.int64),
        media_rows=np.concatenate(rows),
        media_patches=np.concatenate(patches),
        media_modality=named if (named != IMAGE).any() else None,
        media_content=np.concatenate(content),
        media_parts=np.concatenate(parts),
    )
    return MeasuredRecords(np.asarray(usable, dtype=bool), sizes, animated, MediaStatus.joined(status))


def concatenated(parts: Sequence[SampleSizes]) -> SampleSizes:
    """The sizes of several runs of samples as one."""
    nothing = np.empty(0, np.int64)
    counts = np.concatenate([nothing, *(np.diff(part.media_start) for part in parts)])
    return SampleSizes(
        tokens=np.concatenate([nothing, *(part.tokens for part in parts)]),
        targets=np.concatenate([nothing, *(part.targets for part in parts)]),
        media_start=np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        media_rows=np.concatenate([nothing, *(part.media_rows for part in parts)]),
        media_patches=np.concatenate([nothing, *(part.media_patches for part in parts)]),
        media_modality=_joined_modalities(parts),
        media_content=_joined([(part.media_content, len(part.media_rows)) for part in parts], unknown=-1),
        media_parts=_joined([(part.media_parts, len(part.media_rows)) for part in parts], unknown=1),
    )


def _joined(parts: Sequence[tuple[IntArray | None, int]], unknown: int) -> IntArray | None:
    """Numbers of media items one after another; ``unknown`` for all of a part, of so many, where it says nothing."""
    if all(numbers is None for numbers, _ in parts):
        return None
    return np.concatenate([np.full(count, unknown) if numbers is None else numbers for numbers, count in parts])


def _joined_modalities(parts: Sequence[SampleSizes]) -> NameArray | None:
    if all(part.media_modality is None for part in parts):
        return None
    images = (np.full(len(part.media_rows), IMAGE) for part in parts)
    return np.concatenate(
        [some if part.media_modality is None else part.media_modality for part, some in zip(parts, images, strict=True)]
    )
