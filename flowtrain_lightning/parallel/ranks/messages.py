"""Messages of ranks as bytes: JSON, with tags for tuples, paths and tensors. Reading it never runs code."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MAX_MESSAGE_BYTES = 256 << 20
"""A longer message is refused, so that a wrong length cannot take all memory."""

_TAG = "flowtrain"  # the key that marks a dictionary as one of the cases below


def encode_message(value: Any) -> bytes:
    """The bytes of a message.

    Args:
        value: None, numbers, text, paths, tensors, and lists, tuples and dictionaries of these.

    Raises:
        TypeError: something else is in it.
        ValueError: it is longer than ``MAX_MESSAGE_BYTES``.
    """
    message = json.dumps(_to_json(value)).encode()
    if len(message) > MAX_MESSAGE_BYTES:
        raise ValueError(
            f"A message of {len(message):,} bytes was to be sent to other ranks, which take {MAX_MESSAGE_BYTES:,} at "
            "most. Send less, or write it to a file."
        )
    return message


def decode_message(message: bytes) -> Any:
    """The value that :func:`encode_message` was given.

    Raises:
        ValueError: the bytes are no such message.
    """
    return _from_json(json.loads(message))


def _to_json(value: Any) -> Any:
    match value:
        case None | bool() | int() | float() | str():
            return value
        case list():
            return [_to_json(item) for item in value]
        case dict() if all(isinstance(key, str) for key in value) and _TAG not in value:
            return {key: _to_json(item) for key, item in value.items()}
        case dict():
            return {_TAG: "dict", "items": [[_to_json(key), _to_json(item)] for key, item in value.items()]}
        case tuple():
            return {_TAG: "tuple", "items": [_to_json(item) for item in value]}
        case Path():
            return {_TAG: "path", "path": str(value)}
        case Tensor():
            content = value.detach().cpu().contiguous()
            data = content.reshape(-1).view(torch.uint8).numpy().tobytes() if content.numel() else b""
            dtype = str(content.dtype).removeprefix("torch.")
            return {
                _TAG: "tensor",
                "dtype": dtype,
                "shape": list(content.shape),
                "data": base64.b64encode(data).decode(),
            }
    raise TypeError(
        f"{value!r:.80} of type {type(value).__name__} was to be sent to other ranks, which take None, numbers, text, "
        "paths, tensors, and lists, tuples and dictionaries of these. Send its parts."
    )


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"flowtrain": "dict", "items": list(items)}:
            return {_from_json(key): _from_json(item) for key, item in items}
        case {"flowtrain": "tuple", "items": list(items)}:
            return tuple(_from_json(item) for item in items)
        case {"flowtrain": "path", "path": str(path)}:
            return Path(path)
        case {"flowtrain": "tensor", "dtype": str(name), "shape": list(shape), "data": str(data)}:
            return _tensor(name, shape, base64.b64decode(data, validate=True))
        case {"flowtrain": tag}:
            raise ValueError(f"A message from another rank holds {tag!r}, which this version does not know.")
    return {key: _from_json(item) for key, item in value.items()}


def _tensor(name: str, shape: list[int], data: bytes) -> Tensor:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or len(data) != dtype.itemsize * torch.Size(shape).numel():
        raise ValueError(f"A message from another rank holds a tensor {name} {shape} of {len(data)} bytes.")
    if not data:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)
