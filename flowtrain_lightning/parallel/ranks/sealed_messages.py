"""Messages between the ranks of a group beside tensors: of bounded size, sealed with the job's key."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from flowtrain_lightning.parallel.ranks.job_secret import JobKey
from flowtrain_lightning.parallel.ranks.messages import MAX_MESSAGE_BYTES, decode_message, encode_message


def gather_over(
    group: dist.ProcessGroup | None,
    ranks: int,
    value: Any,
    device: torch.device | None = None,
    key: JobKey | None = None,
) -> list[Any]:
    """The values of all ranks of a group of torch.distributed, in rank order.

    Args:
        group: None is the default group.
        ranks: its size.
        value: this rank's; see :func:`~.messages.encode_message` for what it may be.
        device: on whose tensors the group works; None is the CPU.
        key: with which the values are sealed; None believes whoever is in the group.
    """
    if ranks == 1:
        return [value]

    def gather(tensor: Tensor) -> list[Tensor]:
        own = tensor.to(device)
        gathered = [torch.empty_like(own) for _ in range(ranks)]
        dist.all_gather(gathered, own, group=group)
        return [of_rank.cpu() for of_rank in gathered]

    return gather_sealed(value, gather, dist.get_rank(group), key)


def gather_sealed(value: Any, gather: Callable[[Tensor], list[Tensor]], rank: int, key: JobKey | None) -> list[Any]:
    """The values of all ranks of a group in rank order, on every rank.

    Args:
        value: this rank's; see :func:`~.messages.encode_message` for what it may be.
        gather: a CPU tensor of one shape on all ranks -> those of all ranks, in rank order.
        rank: this one's number in the group.
        key: with which the values are sealed; None believes whoever is in the group.

    Raises:
        ValueError: a rank announced a message that is too long.
        ForeignMessageError: one was not sealed with the key.
    """
    message = _seal(value, rank, key)
    sizes = [int(size) for size in gather(torch.tensor([len(message)], device="cpu"))]
    _refuse_long(max(sizes))
    padded = gather(_as_tensor(message, max(sizes)))
    found = (tensor[:size] for tensor, size in zip(padded, sizes, strict=True))
    return [_open(tensor, source, key) for source, tensor in enumerate(found)]


def broadcast_sealed(
    value: Any, broadcast: Callable[[Tensor], Tensor], rank: int, source: int, key: JobKey | None
) -> Any:
    """The value of rank ``source``, on every rank; ``broadcast`` overwrites a CPU tensor with that of this rank.

    Raises:
        ValueError: a rank announced a message that is too long.
        ForeignMessageError: it was not sealed with the key.
    """
    message = _seal(value, source, key) if rank == source else b""
    size = int(broadcast(torch.tensor([len(message)], device="cpu")))
    _refuse_long(size)
    sent = broadcast(_as_tensor(message, size))
    return value if rank == source else _open(sent, source, key)


def _seal(value: Any, source: int, key: JobKey | None) -> bytes:
    message = encode_message(value)
    return message if key is None else key.seal(message, _context(source))


def _open(tensor: Tensor, source: int, key: JobKey | None) -> Any:
    message = tensor.numpy().tobytes()
    return decode_message(message if key is None else key.open(message, _context(source)))


def _context(source: int) -> str:
    return f"a message from rank {source} of a group"


def _as_tensor(message: bytes, size: int) -> Tensor:
    """``[size]`` uint8, which begins with ``message``."""
    tensor = torch.zeros(size, dtype=torch.uint8, device="cpu")
    if message:
        tensor[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    return tensor


def _refuse_long(size: int) -> None:
    if not 0 <= size <= MAX_MESSAGE_BYTES:
        raise ValueError(f"Another rank announced a message of {size:,} bytes; {MAX_MESSAGE_BYTES:,} are the most.")
