"""An optimizer of which a rank holds one part: groups that line up everywhere, and state by parameter name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from flowtrain_lightning.checkpoint.local_shard import LocalShard, in_layout_of, run_within
from flowtrain_lightning.parallel.regions import ElementRun, OptimizerShare

NamedState = dict[str, Any]
"""``{"state": {parameter name: {...}}, "param_groups": [{..., "params": [names]}]}``."""


class NamedOptimizer:
    """Remembers which parameters the user gave to which group, on all ranks alike.

    The user's ``configure_optimizers`` runs on every rank with both halves. Parameters of an absent half are then
    dropped; groups that become empty stay, so that schedulers and settings per group line up.

    Attributes:
        groups: for each group the names of all its parameters, absent ones included, in the user's order.
        shares: of each parameter, by name, of which the optimizer steps a share on this rank.
    """

    def __init__(self, optimizer: Optimizer, module: nn.Module) -> None:
        self._optimizer = optimizer
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._parameters: dict[str, nn.Parameter] = {}
        self.shares: dict[str, OptimizerShare] = {}
        self.groups: list[list[str]] = []
        self._take_groups()

    def share(self, shares: Mapping[nn.Parameter, OptimizerShare]) -> None:
        """Notes that in place of some parameters the optimizer steps a share of them."""
        for name in [name for name, parameter in self._parameters.items() if parameter in shares]:
            self.shares[name] = shares[self._parameters.pop(name)]

    def state(self) -> NamedState:
        """This rank's state by name; the groups name all parameters."""
        self._take_groups()
        state = {name: self._optimizer.state.get(parameter, {}) for name, parameter in self._parameters.items()}
        state |= {name: _runs(self._optimizer.state.get(share.flat, {}), share) for name, share in self.shares.items()}
        return {
            "state": {name: dict(entries) for name, entries in state.items() if entries},
            "param_groups": [
                {**_settings(group), "params": names}
                for group, names in zip(self._optimizer.param_groups, self.groups, strict=True)
            ],
        }

    def to_host(self) -> None:
        """Moves its state off the device: for after a run, as the weights are moved."""
        for entries in self._optimizer.state.values():
            for name, value in entries.items():
                if isinstance(value, Tensor) and not value.is_meta:  # some optimizers have states of absent halves
                    entries[name] = value.cpu()

    def load(self, saved: NamedState) -> None:
        """Takes this rank's part of a state by name, or of a plain PyTorch state (parameters by number).

        Raises:
            ValueError: the groups do not match those of ``configure_optimizers``.
        """
        self._take_groups()
        by_name = with_names(saved, self.groups)
        if len(by_name["param_groups"]) != len(self.groups):
            raise ValueError(
                f"The checkpoint's optimizer has {len(by_name['param_groups'])} parameter groups, but "
                f"configure_optimizers gives {len(self.groups)}. Use the same configure_optimizers as when it was "
                "saved."
            )
        for position, (settings, names) in enumerate(zip(by_name["param_groups"], self.groups, strict=True)):
            if changed := set(names) ^ set(settings["params"]):
                raise ValueError(
                    f"Group {position} of the checkpoint's optimizer and of configure_optimizers differ in "
                    f"{', '.join(sorted(changed))}. Use the same configure_optimizers as when it was saved."
                )
        # PyTorch goes by position: the numbers come in the order of what this rank's optimizer steps.
        own = [group["params"] for group in self._optimizer.param_groups]
        numbers = {id(stepped): n for n, stepped in enumerate(stepped for group in own for stepped in group)}
        groups = [
            {**_settings(settings), "params": [numbers[id(stepped)] for stepped in group]}
            for settings, group in zip(by_name["param_groups"], own, strict=True)
        ]
        saved_state = by_name["state"]
        state = {
            numbers[id(parameter)]: _in_layout(saved_state[name], parameter)
            for name, parameter in self._parameters.items()
            if name in saved_state
        }
        for flat in {id(share.flat): share.flat for share in self.shares.values()}.values():
            shares = {name: share for name, share in self.shares.items() if share.flat is flat}
            if entries := flat_state(flat, shares, saved_state):
                state[numbers[id(flat)]] = entries
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _take_groups(self) -> None:
        """Takes in the groups that are there, and later those that ``optimizer.add_param_group`` has brought since."""
        for group in self._optimizer.param_groups[len(self.groups) :]:
            self.groups.append([_name(parameter, self._names) for parameter in group["params"]])
            group["params"] = [parameter for parameter in group["params"] if not parameter.is_meta]
            self._parameters |= {self._names[id(parameter)]: parameter for parameter in group["params"]}


def load_optimizers(optimizers: Sequence[NamedOptimizer], saved: Sequence[NamedState]) -> None:
    """Loads this rank's part of the optimizers' state.

    Raises:
        ValueError: there are other optimizers, or other groups, than those that were saved.
    """
    if len(saved) != len(optimizers):
        raise ValueError(
            f"The checkpoint holds the state of {len(saved)} optimizers, but configure_optimizers returns "
            f"{len(optimizers)}. Use the same configure_optimizers as when it was saved."
        )
    for optimizer, state in zip(optimizers, saved, strict=True):
        optimizer.load(state)


def with_names(saved: Mapping[str, Any], groups: list[list[str]]) -> NamedState:
    """An optimizer's state by name. PyTorch numbers parameters through all groups in order.

    Raises:
        ValueError: ``groups`` has other numbers of groups or parameters than were saved.
    """
    numbered = [n for group in saved["param_groups"] for n in group["params"]]
    if all(isinstance(n, str) for n in numbered):
        return dict(saved)
    names = [name for group in groups for name in group]
    if len(numbered) != len(names) or len(saved["param_groups"]) != len(groups):
        raise ValueError(
            f"The checkpoint's optimizer holds {len(numbered)} parameters in {len(saved['param_groups'])} groups, but "
            f"configure_optimizers gives {len(names)} in {len(groups)}. Use the same configure_optimizers as when it "
            "was saved."
        )
    name_of = dict(zip(numbered, names, strict=True))
    return {
        "state": {name_of[n]: entries for n, entries in saved["state"].items()},
        "param_groups": [
            {**_settings(group), "params": [name_of[n] for n in group["params"]]} for group in saved["param_groups"]
        ],
    }


def with_numbers(saved: NamedState) -> dict[str, Any]:
    """An optimizer's state as PyTorch writes it: parameters by number, through all groups in order."""
    numbers: dict[str, int] = {}
    for group in saved["param_groups"]:
        for name in group["params"]:
            numbers[name] = len(numbers)
    return {
        "state": {numbers[name]: entries for name, entries in saved["state"].items()},
        "param_groups": [
            {**_settings(group), "params": [numbers[name] for name in group["params"]]}
            for group in saved["param_groups"]
        ],
    }


def _in_layout(entries: Mapping[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
    """Entries of a state, sharded as the parameter is; those of another shape, as a count of steps, stay plain."""
    if not isinstance(parameter, DTensor):
        return dict(entries)
    return {
        entry: in_layout_of(value, parameter) if _is_like(value, parameter.shape) else value
        for entry, value in entries.items()
    }


def _runs(entries: Mapping[str, Any], share: OptimizerShare) -> dict[str, Any]:
    """A parameter's entries, of those of a flat tensor; a count of steps is that of all parameters in it."""
    whole = {entry: value for entry, value in entries.items() if not _is_like(value, share.flat.shape)}
    if share.size == 0:  # the ranks that step the parameter tell of the others
        return whole
    runs = {entry: ElementRun(share.of(entries[entry]), share.start, share.shape) for entry in entries.keys() - whole}
    return {**whole, **runs}


def flat_state(
    flat: Tensor, shares: Mapping[str, OptimizerShare], saved: Mapping[str, Mapping[str, Any]]
) -> dict[str, Any]:
    """The state of a flat tensor, of which several parameters have a share.

    Args:
        flat: what the optimizer steps.
        shares: by the parameters' names.
        saved: their states, entry by entry; empty where they were never stepped.

    Raises:
        ValueError: parameters were not stepped equally often, which one state cannot tell.
    """
    stepped = [name for name in shares if saved.get(name)]
    found: dict[str, Any] = {}
    for name in stepped:
        for entry, value in saved[name].items():
            if _is_like(value, shares[name].shape):
                share = shares[name]
                share.of(found.setdefault(entry, torch.zeros_like(flat, requires_grad=False))).copy_(
                    run_within(value, share.start, share.size)
                )
            elif not _is_equal(found.setdefault(entry, value), value):
                _refuse_unlike(stepped[0], name, f"{entry} is {found[entry]} and {value}")
    if stepped and len(stepped) < len(shares):
        _refuse_unlike(stepped[0], next(name for name in shares if name not in stepped), "the latter was never stepped")
    return found


def _refuse_unlike(one: str, other: str, difference: str) -> None:
    raise ValueError(
        f"The checkpoint's optimizer has treated {one} and {other} differently ({difference}), but DeepSpeed keeps one "
        "state for all weights of a parameter group that lie on a half. Go on in the layout in which it was saved, or "
        "in one of whole copies or shards ('replicate', 'fsdp')."
    )


def _is_like(value: Any, shape: Sequence[int]) -> bool:
    """Whether an entry has a number for each element of a parameter, or of a flat tensor."""
    return isinstance(value, Tensor | LocalShard) and bool(value.shape) and tuple(value.shape) == tuple(shape)


def _is_equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) and isinstance(other, Tensor) else bool(one == other)


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _name(parameter: nn.Parameter, names: Mapping[int, str]) -> str:
    if id(parameter) not in names:
        raise ValueError(
            f"configure_optimizers gave the optimizer a parameter of shape {tuple(parameter.shape)} that is not a "
            "parameter of the module. Pass parameters of `self` only."
        )
    return names[id(parameter)]
