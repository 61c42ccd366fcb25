"""Lets an optimizer step DTensors and plain weights of one parameter group, which PyTorch's fast kernels do not mix.

On CUDA, optimizers step all weights of a group by one kernel (``foreach`` or ``fused``). It takes plain tensors, or
DTensors of one mesh. A rank may hold both: norms stay whole where tensor ranks share matrices, and of two halves one
may be sharded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

_Group = dict[str, Any]


@contextmanager
def stepping_by_kind(optimizer: Optimizer) -> Iterator[None]:
    """Inside, ``optimizer.step`` sees a group for each kind of weight in place of a group that has several kinds.

    The groups are divided after the step's closure and put together when this ends, whether or not the step fails. So
    hooks, schedulers, loggers and checkpoints see the groups that `configure_optimizers` made.
    """
    if all(len(_by_kind(group)) == 1 for group in optimizer.param_groups):
        yield
        return
    divided: list[tuple[_Group, list[_Group]]] = []

    def divide() -> None:
        divided.extend((group, _by_kind(group)) for group in optimizer.param_groups)
        optimizer.param_groups[:] = [part for _, parts in divided for part in parts]

    def divide_after(closure: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            result = closure()
            divide()
            return result

        return run

    def before(_: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        itself, *given = args
        closure = kwargs.get("closure") or next(iter(given), None)
        if closure is None:
            divide()
            return args, kwargs
        return (itself,), {**kwargs, "closure": divide_after(closure)}

    hook = optimizer.register_step_pre_hook(before)
    try:
        yield
    finally:
        hook.remove()
        if divided:
            optimizer.param_groups[:] = [_joined(group, parts) for group, parts in divided]


def _by_kind(group: _Group) -> list[_Group]:
    """The group itself where all of its weights are of one kind, else a group for each kind."""
    kinds: dict[Any, list[Any]] = {}
    for weight in group["params"]:
        kinds.setdefault(weight.device_mesh if isinstance(weight, DTensor) else None, []).append(weight)
    return [group] if len(kinds) < 2 else [{**group, "params": weights} for weights in kinds.values()]


def _joined(group: _Group, parts: list[_Group]) -> _Group:
    """The group, with whatever the optimizer has noted in its parts besides weights."""
    group.update({name: value for name, value in parts[-1].items() if name != "params"})
    return group
