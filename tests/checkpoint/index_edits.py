"""What somebody may do to a checkpoint's index who knows its format: all its digests are right afterwards."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flowtrain_lightning.checkpoint.checkpoint_index import piece_key
from flowtrain_lightning.checkpoint.digest import digest_of
from flowtrain_lightning.parallel.regions import Region

Pieces = frozenset[str]
"""What files call the pieces of tensors that an edit concerns: an error names one of them, or their tensor."""

HUGE = (2**31, 2**62, 2**63, 2**64 + 1, 10**40, -1, 0)
"""Sizes that no tensor here has, and some that no integer of 64 bits has."""


def read_text(path: Path) -> str:
    """What follows the first line of the index, as JSON."""
    return "{" + (path / "index.json").read_text().partition("\n")[2]


def write_text(path: Path, text: str, number: int | None = None) -> None:
    """Writes the index anew, of the format that it has or of another one."""
    if number is None:
        number = json.loads((path / "index.json").read_text())["flowtrain"]
    content = text.removeprefix("{")
    digest = digest_of(f"{number}\n{content}".encode())
    (path / "index.json").write_text(f'{{"flowtrain": {number}, "digest": "{digest}",\n{content}')


def rewrite_index(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes what the index says."""
    content = json.loads(read_text(path))
    change(content)
    write_text(path, json.dumps(content))


# ---- what it says ---------------------------------------------------------------------------------------------------


def edit_index(path: Path, draw: random.Random) -> tuple[str, Pieces]:
    """Changes what the index says of a tensor, or of the files."""
    content = json.loads(read_text(path))
    name, edit = draw.choice(list(EDITS.items()))
    key = draw.choice([key for key, stored in content["tensors"].items() if stored["shape"]])
    concerned = _keys(key, content["tensors"][key])
    concerned |= edit(content, content["tensors"][key], key, draw) or frozenset()
    write_text(path, json.dumps(content))
    return f"{name} ({key})", concerned if name not in NAMELESS else frozenset()


def _keys(key: str, tensor: dict[str, Any]) -> Pieces:
    regions = (Region(tuple(piece["offsets"]), tuple(piece["sizes"])) for piece in tensor["pieces"])
    return frozenset(piece_key(key, region) for region in regions)


def _drop_a_piece(index: dict[str, Any], tensor: dict[str, Any], key: str, draw: random.Random) -> None:
    tensor["pieces"].pop(draw.randrange(len(tensor["pieces"])))


def _double_a_piece(index: dict[str, Any], tensor: dict[str, Any], key: str, draw: random.Random) -> None:
    tensor["pieces"].append(draw.choice(tensor["pieces"]))


def _swap_digests(index: dict[str, Any], tensor: dict[str, Any], key: str, draw: random.Random) -> Pieces:
    one = draw.choice(tensor["pieces"])
    others = {name: other for name, other in index["tensors"].items() if other["pieces"]}
    name = draw.choice([name for name, other in others.items() if other["pieces"][0]["digest"] != one["digest"]])
    other = others[name]["pieces"][0]
    one["digest"], other["digest"] = other["digest"], one["digest"]
    return _keys(name, others[name])


def _shift(index: dict[str, Any], tensor: dict[str, Any], key: str, draw: random.Random) -> None:
    piece = draw.choice(tensor["pieces"])
    piece["offsets"][draw.randrange(len(tensor["shape"]))] += draw.choice([-1, 1])


def _resize(index: dict[str, Any], tensor: dict[str, Any], key: str, draw: random.Random) -> None:
    piece = draw.choice(tensor["pieces"])
    piece["sizes"][draw.randrange(len(tensor["shape"]))] += draw.choice([-1, 1])


def _reshape(index: dict[str, Any], tensor: dict[str, Any], key: str, draw: random.Random) -> None:
    tensor["shape"][draw.randrange(len(tensor["shape"]))] += draw.choice([-1, 1])


def _overflow(index: dict[str, Any], tensor: dict[str, Any], key: str, draw: random.Random) -> None:
    place, size = draw.randrange(len(tensor["shape"])), draw.choice(HUGE)
    which = draw.choice(["shape", "sizes", "offsets", "both"])
    if which in ("shape", "both"):
        tensor["shape"][place] = size
    if which in ("sizes", "offsets"):
        tensor["pieces"][0][which][place] = size if (which, size) != ("offsets", 0) else 3
    if which == "both":
        tensor["pieces"] = [{**tensor["pieces"][0], "offsets": [0] * len(tensor["shape"]), "sizes": tensor["shape"]}]


def _retype(index: dict[str, Any], tensor: dict[str, Any], key: str, draw: random.Random) -> None:
    tensor["dtype"] = draw.choice(["int32", "float16", "float64", "none", "load", "", "Tensor", 5, None])


def _wrong_kind(index: dict[str, Any], tensor: dict[str, Any], key: str, draw: random.Random) -> None:
    wrong = draw.choice([None, "3", 3.0, True, [], {}])
    holder, name = draw.choice([(tensor, "shape"), (tensor, "pieces"), (tensor["pieces"][0], "offsets")])
    holder[name] = [wrong] if draw.random() < 0.5 else wrong


def _rename(index: dict[str, Any], tensor: dict[str, Any], key: str, draw: random.Random) -> Pieces:
    others = [f"{key}x", f"current.{key}", key.replace("weights.", "current."), key.replace("r.0.", "r.5."), "x", ""]
    name = draw.choice([other for other in others if other != key])
    index["tensors"] = {name if each == key else each: stored for each, stored in index["tensors"].items()}
    return frozenset({repr(name)})


def _swap_names(index: dict[str, Any], tensor: dict[str, Any], key: str, draw: random.Random) -> Pieces:
    first = tensor["pieces"][0]["digest"]
    others = [name for name, other in index["tensors"].items() if other["pieces"][0]["digest"] != first]
    name = draw.choice([name for name in others if index["tensors"][name]["shape"] == tensor["shape"]] or others)
    tensors = index["tensors"]
    tensors[key], tensors[name] = tensors[name], tensors[key]
    return _keys(key, tensors[key]) | _keys(name, tensors[name])


def _say_another_file(index: dict[str, Any], tensor: dict[str, Any], key: str, draw: random.Random) -> None:
    piece = draw.choice(tensor["pieces"])
    others = [name for name in index["files"] if name != piece["file"]]
    piece["file"] = draw.choice([*others, "rank-7.safetensors", "../other/encoder/rank-00000.safetensors", "/", ""])


def _forget_a_file(index: dict[str, Any], tensor: dict[str, Any], key: str, draw: random.Random) -> None:
    del index["files"][draw.choice(list(index["files"]))]


def _resize_a_file(index: dict[str, Any], tensor: dict[str, Any], key: str, draw: random.Random) -> None:
    file = index["files"][draw.choice(list(index["files"]))]
    file["size"] = draw.choice([file["size"] + 1, *HUGE, 1e400, None, "", []])


def _forget_optimizers(index: dict[str, Any], tensor: dict[str, Any], key: str, draw: random.Random) -> None:
    index["lightning"]["optimizer_states"] = []


def _forget_a_part(index: dict[str, Any], tensor: dict[str, Any], key: str, draw: random.Random) -> None:
    part = draw.choice(["run", "lightning", "values", "files", "tensors"])
    if draw.random() < 0.5:
        del index[part]
    else:
        index[part] = draw.choice([[], None, 5, "text"])


def _nest(index: dict[str, Any], tensor: dict[str, Any], key: str, draw: random.Random) -> None:
    nested: list[Any] = []
    for _ in range(500):
        nested = [nested]
    index["tensors"][key] = nested


Edit = Callable[[dict[str, Any], dict[str, Any], str, random.Random], "Pieces | None"]

EDITS: dict[str, Edit] = {
    "no pieces": lambda index, tensor, key, draw: tensor["pieces"].clear(),
    "a piece too few": _drop_a_piece,
    "a piece twice": _double_a_piece,
    "digests of each other": _swap_digests,
    "a piece elsewhere": _shift,
    "a piece of another size": _resize,
    "a tensor of another shape": _reshape,
    "a tensor of more dimensions": lambda index, tensor, key, draw: tensor["shape"].append(1),
    "a tensor of fewer dimensions": lambda index, tensor, key, draw: tensor["shape"].pop() and None,
    "a size that overflows": _overflow,
    "another type": _retype,
    "no list of numbers": _wrong_kind,
    "another name": _rename,
    "names of each other": _swap_names,
    "a piece in another file": _say_another_file,
    "a tensor less": lambda index, tensor, key, draw: index["tensors"].pop(key) and None,
    "a file less": _forget_a_file,
    "a file of another size": _resize_a_file,
    "no optimizers": _forget_optimizers,
    "a part less": _forget_a_part,
    "nested deep": _nest,
}
"""What may be said in the index instead. The files that it lists are as they were."""

NAMELESS = {"a file less", "a file of another size", "no optimizers", "a part less", "a piece in another file"}
"""Edits after which an error names a file, and need not name a tensor."""


# ---- how it is written ----------------------------------------------------------------------------------------------


def edit_json(path: Path, draw: random.Random) -> str:
    """Writes the index as no JSON that a careful writer makes: a key twice, or with what is not JSON at all."""
    text = read_text(path)
    kind = draw.choice(["a key twice", "a key twice", "a key twice", "deep brackets", "not UTF-8", "many digits"])
    if kind == "a key twice":
        text = _doubled(json.loads(text), draw)
    elif kind == "deep brackets":
        text = text[:-1] + ', "more": ' + "[" * 100_000
    elif kind == "many digits":
        text = text[:-1] + ', "more": ' + "1" * 5_000 + "}"
    else:
        text = text.replace("float32", "float3\udc80", 1)
        data = text.removeprefix("{").encode(errors="surrogateescape")
        first = '{"flowtrain": 2, "digest": "' + digest_of(b"2\n" + data) + '",\n'
        (path / "index.json").write_bytes(first.encode() + data)
        return kind
    write_text(path, text)
    return kind


_AGAIN = "(again)"


def _doubled(content: dict[str, Any], draw: random.Random) -> str:
    holders = [holder for holder in _objects(content) if holder]
    holder = draw.choice([content, content["tensors"], draw.choice(holders)])
    key = draw.choice(list(holder))
    again = {key + _AGAIN: _another(holder[key])}
    entries = {**again, **holder} if draw.random() < 0.5 else {**holder, **again}
    holder.clear()
    holder.update(entries)
    return json.dumps(content).replace(_AGAIN, "")


def _objects(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, list):
        return [each for item in value for each in _objects(item)]
    if isinstance(value, dict):
        return [value, *(each for item in value.values() for each in _objects(item))]
    return []


def _another(value: Any) -> Any:
    """Another value of the same kind."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return value[::-1] + "x"
        case list() | dict():
            return type(value)()
    return 0
