"""The files of a tar file in order, up to its marked end: Python's reader stops at a damaged header without a word."""

from __future__ import annotations

import tarfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import BinaryIO

from flowtrain_lightning.data.data_error import DataError

BLOCK = 512
"""Bytes to whose multiples tar fills headers and files up."""

_END = 2 * BLOCK
"""Bytes of zeros that mark the end."""

_RECORD = 20 * BLOCK
"""Bytes to whose multiples tar, WebDataset and Python fill a file up with zeros, behind the end."""

_PAX, _LONG_NAMES = (b"x", b"g"), (b"L", b"K")
"""Kinds of headers that hold what does not fit into the next one: names and values; a long name or link."""

_WITHOUT_BYTES = (
    tarfile.DIRTYPE, tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE
)  # fmt: skip
"""Kinds of members behind whose header the next one follows."""

_SKIPPED = (tarfile.DIRTYPE, b"D", b"V")
"""Kinds of members that hold no file's bytes: folders, listings of folders, and the name of the whole."""


def members_of(file: BinaryIO, path: Path) -> Iterator[tarfile.TarInfo]:
    """The files of a whole tar file, but for hidden ones, as WebDataset has it: macOS puts such beside others.

    Args:
        file: the tar file.
        path: its path, for messages.

    Raises:
        DataError: it is no tar file, it is compressed, or a part of it is missing or damaged.
    """
    end = yield from _members(file, path)
    _refuse_what_follows(file, path, end)


def members_within(file: BinaryIO, path: Path, length: int) -> Iterator[tarfile.TarInfo]:
    """The files of a part of a tar file that has no end mark, such as one record.

    Args:
        file: the part.
        path: of the whole, for messages.
        length: of the part in bytes.

    Raises:
        DataError: it is not what was found there when the whole was read.
    """
    end = yield from _members(file, path)
    if end != length:
        raise DataError(f"{path}: it was changed after it was indexed; start again to index it anew.")


def _members(file: BinaryIO, path: Path) -> Generator[tarfile.TarInfo, None, int]:
    """Yields the files, and returns the place behind the last member that can be read."""
    end = 0
    try:
        with tarfile.open(fileobj=file, mode="r:") as tar:
            for member in tar:
                _refuse_damaged_header(file, path, member)
                end = member.offset_data + (0 if member.type in _WITHOUT_BYTES else -(-member.size // BLOCK) * BLOCK)
                if _holds_record_file(member, path):
                    yield member
    except (tarfile.TarError, OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            f"{path}: it is no tar file that can be read at any place ({error}); unpack a compressed one first, copy a "
            "damaged one again."
        ) from error
    return end


def _holds_record_file(member: tarfile.TarInfo, path: Path) -> bool:
    """Whether a member is a file that belongs to a record. Refuses what looks like one and has no bytes of its own."""
    base = member.name.rpartition("/")[2]
    if member.type in _SKIPPED or base.startswith("."):
        return False
    if not member.isreg() or member.issparse():
        kind = "a link to another one" if member.islnk() or member.issym() else "not stored as a plain file"
        raise DataError(
            f"{path}: its member {member.name!r:.200} is {kind}, whose bytes are not where they are looked for. Write "
            "the shard with plain files (GNU tar: --dereference --hard-dereference, and no --sparse)."
        )
    if "\0" in member.name or not base:
        raise DataError(
            f"{path}: the name of its member {member.name!r:.200} is damaged; copy or write the shard anew."
        )
    return True


def _refuse_damaged_header(file: BinaryIO, path: Path, member: tarfile.TarInfo) -> None:
    """Long names and sizes stand in front of a header, without a checksum: Python passes over what is damaged there."""
    if member.offset_data - member.offset <= BLOCK:
        return
    file.seek(member.offset)
    headers = file.read(member.offset_data - member.offset)
    place = 0
    while place + BLOCK < len(headers):
        header = tarfile.TarInfo.frombuf(headers[place : place + BLOCK], "utf-8", "surrogateescape")
        content = headers[place + BLOCK : place + BLOCK + header.size]
        if (header.type in _PAX and not _is_pax(content)) or (header.type in _LONG_NAMES and b"\0" in content[:-1]):
            raise DataError(
                f"{path}: the name or size of its member {member.name!r:.200} is damaged; copy or write the shard anew."
            )
        place += BLOCK + -(-header.size // BLOCK) * BLOCK


def _is_pax(content: bytes) -> bool:
    """Whether it is a row of entries such as ``19 path=folder/a.json`` and a line's end, with their own lengths."""
    place = 0
    while place < len(content):
        length = content[place : place + 20].partition(b" ")[0]
        entry = content[place : place + int(length)] if length.isdigit() else b""
        if b"=" not in entry or not entry.endswith(b"\n"):
            return False
        place += len(entry)
    return place == len(content)


def _refuse_what_follows(file: BinaryIO, path: Path, end: int) -> None:
    """Behind the last member there are two blocks of zeros or more, and nothing else."""
    file.seek(end)
    rest = file.read(_END + _RECORD + 1)
    zeros = len(rest) - len(rest.lstrip(b"\0"))
    if zeros < len(rest):
        raise DataError(
            f"{path}: no more files can be read from byte {end} on, but more follows: a header there is damaged, or "
            "several tar files were put one behind another. Copy the shard again, or write it anew; several shards are "
            "named as a list or by a pattern."
        )
    if zeros < _END:
        raise DataError(
            f"{path}: it ends at byte {end + zeros} without the two blocks of zeros that mark the end of a tar file, "
            "so it was cut, and records may be missing. Copy the shard again, or write it anew."
        )
    if zeros > _END + _RECORD - BLOCK:
        raise DataError(
            f"{path}: more than {_RECORD} bytes of zeros follow its end at byte {end}, more than writers of tar files "
            "add, so what stood there may be lost. Copy the shard again, or write it anew with tar's usual blocks."
        )
