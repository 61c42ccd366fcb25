"""Ways to damage a checkpoint directory, drawn from a seed. Each changes what is stored, and says what it did."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowtrain_lightning.checkpoint.digest import digest_of


def damage(path: Path, seed: int) -> str:
    """Damages a checkpoint and says how."""
    draw = random.Random(seed)
    way = draw.choice(WAYS)
    return f"{way.__name__.strip('_')}: {way(path, draw)}"


def files_of(path: Path) -> list[Path]:
    """All files of a checkpoint."""
    return sorted(file for file in path.rglob("*") if file.is_file())


def rewrite_index(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Edits the index as somebody would who knows its format: with a digest that is right."""
    first, _, content = (path / "index.json").read_text().partition("\n")
    edited = json.loads("{" + content)
    change(edited)
    text = json.dumps(edited)[1:]
    first = re.sub("[0-9a-f]{32}", digest_of(text.encode()), first)
    (path / "index.json").write_text(f"{first}\n{text}")


def _flip_bits(path: Path, draw: random.Random) -> str:
    file = draw.choice(files_of(path))
    data = bytearray(file.read_bytes())
    places = draw.sample(range(8 * len(data)), draw.choice([1, 1, 2, 3, 20]))
    for place in places:
        data[place // 8] ^= 1 << place % 8
    file.write_bytes(data)
    return f"bits {places} of {file.name}"


def _overwrite(path: Path, draw: random.Random) -> str:
    file = draw.choice(files_of(path))
    data = bytearray(file.read_bytes())
    start = draw.randrange(len(data))
    length = draw.randrange(1, len(data) - start + 1)
    former = bytes(data[start : start + length])
    new = draw.choice([bytes(length), draw.randbytes(length)])
    data[start : start + length] = new if new != former else bytes(byte ^ 255 for byte in former)
    file.write_bytes(data)
    return f"{length} bytes of {file.name} from {start} on"


def _truncate(path: Path, draw: random.Random) -> str:
    file = draw.choice(files_of(path))
    length = draw.randrange(file.stat().st_size)
    os.truncate(file, length)
    return f"{file.name} to {length} bytes"


def _lengthen(path: Path, draw: random.Random) -> str:
    file = draw.choice(files_of(path))
    with file.open("ab") as end:
        end.write(draw.choice([b"\n", b" ", bytes(8), draw.randbytes(100)]))
    return file.name


def _remove(path: Path, draw: random.Random) -> str:
    file = draw.choice(files_of(path))
    file.unlink()
    return file.name


def _swap_files(path: Path, draw: random.Random) -> str:
    one, other = draw.sample(files_of(path), 2)
    contents = one.read_bytes(), other.read_bytes()
    other.write_bytes(contents[0])
    one.write_bytes(contents[1])
    return f"{one.name} and {other.name}"


def _of_another_checkpoint(path: Path, draw: random.Random) -> str:
    file = draw.choice(files_of(path))
    file.write_bytes((path.with_name("other.ckpt") / file.relative_to(path)).read_bytes())
    return file.name


def _add_a_file(path: Path, draw: random.Random) -> str:
    file = draw.choice([file for file in files_of(path) if file.suffix == ".safetensors"])
    file.with_name("rank-00009.safetensors").write_bytes(file.read_bytes())
    return file.name


def _edit_the_index(path: Path, draw: random.Random) -> str:
    name, edit = draw.choice(list(EDITS.items()))

    def change(index: dict[str, Any]) -> None:
        key = draw.choice([key for key, stored in index["tensors"].items() if len(stored["shape"]) == 2])
        edit(index, index["tensors"][key], draw)

    rewrite_index(path, change)
    return name


def _swap_digests(index: dict[str, Any], tensor: dict[str, Any], draw: random.Random) -> None:
    pieces = [piece for other in index["tensors"].values() for piece in other["pieces"]]
    one = tensor["pieces"][0]
    other = draw.choice([piece for piece in pieces if piece["digest"] != one["digest"]])
    one["digest"], other["digest"] = other["digest"], one["digest"]


def _shift(index: dict[str, Any], tensor: dict[str, Any], draw: random.Random) -> None:
    tensor["pieces"][0]["offsets"][draw.randrange(2)] += draw.choice([-1, 1])


def _resize(index: dict[str, Any], tensor: dict[str, Any], draw: random.Random) -> None:
    tensor["pieces"][0]["sizes"][draw.randrange(2)] += draw.choice([-1, 1])


def _reshape(index: dict[str, Any], tensor: dict[str, Any], draw: random.Random) -> None:
    tensor["shape"][draw.randrange(2)] += draw.choice([-1, 1])


def _turn(index: dict[str, Any], tensor: dict[str, Any], draw: random.Random) -> None:
    tensor["shape"].append(1)


EDITS: dict[str, Callable[[dict[str, Any], dict[str, Any], random.Random], object]] = {
    "no pieces": lambda index, tensor, draw: tensor["pieces"].clear(),
    "a piece too few": lambda index, tensor, draw: tensor["pieces"].pop(),
    "a piece twice": lambda index, tensor, draw: tensor["pieces"].append(tensor["pieces"][0]),
    "digests of each other": _swap_digests,
    "a piece elsewhere": _shift,
    "a piece of another size": _resize,
    "a tensor of another shape": _reshape,
    "a tensor of more dimensions": _turn,
    "another type": lambda index, tensor, draw: tensor.update(dtype=draw.choice(["int32", "float16", "none", "load"])),
    "a file that is not there": lambda index, tensor, draw: tensor["pieces"][0].update(file="rank-7.safetensors"),
    "a tensor less": lambda index, tensor, draw: index["tensors"].pop(draw.choice(list(index["tensors"]))),
    "no list of files": lambda index, tensor, draw: index.pop("files"),
    "no random states": lambda index, tensor, draw: index["files"].pop("random_states.json"),
    "a list for a dictionary": lambda index, tensor, draw: index.update(tensors=[]),
}
"""What somebody may do to the index, though not to the files it lists."""

WAYS: list[Callable[[Path, random.Random], str]] = [
    _flip_bits,
    _flip_bits,
    _overwrite,
    _truncate,
    _lengthen,
    _remove,
    _swap_files,
    _of_another_checkpoint,
    _add_a_file,
    _edit_the_index,
]
