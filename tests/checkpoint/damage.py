"""Ways to damage a checkpoint directory, drawn from a seed. Each changes what is stored, and says what it did."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.checkpoint.index_edits import edit_index, edit_json

LENGTH = 8
"""Bytes at the beginning of a safetensors file that tell how long its header is."""


class Damage(NamedTuple):
    """What was done to a checkpoint.

    Attributes:
        how: in words.
        pieces: what files call the pieces of tensors that are hit, where it is known: an error names one of them.
    """

    how: str
    pieces: frozenset[str] = frozenset()


def damage(path: Path, former: Path, seed: int) -> Damage:
    """Damages a checkpoint.

    Args:
        path: the checkpoint.
        former: another one of the same run, from which parts may be taken.
        seed: what is done is drawn from it.
    """
    draw = random.Random(seed)
    way = draw.choice(WAYS)
    how, pieces = way(path, former, draw)
    return Damage(f"{way.__name__.strip('_')}: {how}", pieces)


def files_of(path: Path) -> list[Path]:
    """All files of a checkpoint."""
    return sorted(file for file in path.rglob("*") if file.is_file())


def pieces_in(file: Path) -> dict[str, tuple[int, int]]:
    """What a safetensors file calls the pieces in it -> between which bytes of the file each lies."""
    data = file.read_bytes()
    begin = LENGTH + int.from_bytes(data[:LENGTH], "little")
    header = json.loads(data[LENGTH:begin])
    header.pop("__metadata__", None)
    return {key: tuple(begin + offset for offset in piece["data_offsets"]) for key, piece in header.items()}


def _hit(file: Path, first: int, last: int) -> frozenset[str]:
    """The pieces that share bytes ``first`` to ``last``; none where the header is hit, or the file holds no tensors."""
    if file.suffix != ".safetensors":
        return frozenset()
    pieces = pieces_in(file)
    if first < min(begin for begin, _ in pieces.values()):
        return frozenset()
    return frozenset(key for key, (begin, end) in pieces.items() if begin <= last and first < end)


def _flip_bits(path: Path, former: Path, draw: random.Random) -> Damage:
    file = draw.choice(files_of(path))
    data = bytearray(file.read_bytes())
    places = draw.sample(range(8 * len(data)), draw.choice([1, 1, 2, 3]))
    hit = [_hit(file, place // 8, place // 8) for place in places]
    for place in places:
        data[place // 8] ^= 1 << place % 8
    file.write_bytes(data)
    return Damage(f"bits {places} of {file.name}", frozenset().union(*hit) if all(hit) else frozenset())


def _flip_a_bit_at_the_beginning(path: Path, former: Path, draw: random.Random) -> Damage:
    file = draw.choice([path / "index.json", *path.glob("*/*.safetensors")])
    data = bytearray(file.read_bytes())
    place = draw.randrange(8 * 70)
    data[place // 8] ^= 1 << place % 8
    file.write_bytes(data)
    return Damage(f"bit {place} of {file.name}")


def _overwrite(path: Path, former: Path, draw: random.Random) -> Damage:
    file = draw.choice(files_of(path))
    data = bytearray(file.read_bytes())
    start = draw.randrange(len(data))
    length = min(draw.choice([1, 8, 512, 4096, len(data)]), len(data) - start)
    hit = _hit(file, start, start + length - 1)
    before = bytes(data[start : start + length])
    new = draw.choice([bytes(length), draw.randbytes(length), (b" " * length)])
    data[start : start + length] = new if new != before else bytes(byte ^ 255 for byte in before)
    file.write_bytes(data)
    return Damage(f"{length} bytes of {file.name} from {start} on", hit)


def _swap_bytes(path: Path, former: Path, draw: random.Random) -> Damage:
    file = draw.choice(files_of(path))
    data = bytearray(file.read_bytes())
    one = draw.randrange(len(data))
    other = draw.choice([place for place, byte in enumerate(data) if byte != data[one]])
    hit = [_hit(file, place, place) for place in (one, other)]
    data[one], data[other] = data[other], data[one]
    file.write_bytes(data)
    return Damage(f"bytes {one} and {other} of {file.name}", frozenset().union(*hit) if all(hit) else frozenset())


def _truncate(path: Path, former: Path, draw: random.Random) -> Damage:
    file = draw.choice(files_of(path))
    length = draw.choice([0, draw.randrange(file.stat().st_size), file.stat().st_size - 1])
    os.truncate(file, length)
    return Damage(f"{file.name} to {length} bytes")


def _lengthen(path: Path, former: Path, draw: random.Random) -> Damage:
    file = draw.choice(files_of(path))
    with file.open("ab") as end:
        end.write(draw.choice([b"\n", b" ", bytes(8), draw.randbytes(100), file.read_bytes()]))
    return Damage(file.name)


def _drop_bytes(path: Path, former: Path, draw: random.Random) -> Damage:
    file = draw.choice(files_of(path))
    data = file.read_bytes()
    start = draw.randrange(len(data))
    length = draw.randrange(1, len(data) - start + 1)
    file.write_bytes(data[:start] + data[start + length :] + draw.choice([b"", bytes(length)]))
    return Damage(f"{length} bytes of {file.name} from {start} on")


def _remove(path: Path, former: Path, draw: random.Random) -> Damage:
    file = draw.choice(files_of(path))
    file.unlink()
    return Damage(file.name)


def _put_something_else_there(path: Path, former: Path, draw: random.Random) -> Damage:
    file = draw.choice(files_of(path))
    file.unlink()
    kind = draw.choice(["folder", "pipe", "link to nothing"])
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("nowhere")
    return Damage(f"a {kind} in the place of {file.name}")


def _swap_files(path: Path, former: Path, draw: random.Random) -> Damage:
    one, other = draw.sample(files_of(path), 2)
    contents = one.read_bytes(), other.read_bytes()
    other.write_bytes(contents[0])
    one.write_bytes(contents[1])
    return Damage(f"{one.name} and {other.name}")


def _take_of_the_former(path: Path, former: Path, draw: random.Random) -> Damage:
    others = {file: (former / file.relative_to(path)).read_bytes() for file in files_of(path)}
    differ = [file for file, other in others.items() if file.read_bytes() != other]
    taken = draw.sample(differ, draw.randint(1, len(differ) - 1))  # all would make it the former, and whole
    for file in taken:
        file.write_bytes(others[file])
    return Damage(", ".join(file.name for file in taken))


def _add_a_file(path: Path, former: Path, draw: random.Random) -> Damage:
    file = draw.choice([file for file in files_of(path) if file.suffix == ".safetensors"])
    file.with_name(draw.choice(["rank-00009.safetensors", "rank-00009.pt"])).write_bytes(file.read_bytes())
    return Damage(file.name)


def _edit_the_index(path: Path, former: Path, draw: random.Random) -> Damage:
    return Damage(*edit_index(path, draw))


def _edit_the_json(path: Path, former: Path, draw: random.Random) -> Damage:
    return Damage(edit_json(path, draw))


WAYS: list[Callable[[Path, Path, random.Random], Damage]] = [
    _flip_bits,
    _flip_bits,
    _flip_bits,
    _flip_a_bit_at_the_beginning,
    _overwrite,
    _swap_bytes,
    _drop_bytes,
    _truncate,
    _lengthen,
    _remove,
    _put_something_else_there,
    _swap_files,
    _take_of_the_former,
    _add_a_file,
    _edit_the_index,
    _edit_the_index,
    _edit_the_json,
]
