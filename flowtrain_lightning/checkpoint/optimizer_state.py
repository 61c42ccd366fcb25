"""An optimizer of which a rank holds one part: groups that line up everywhere, and state by parameter name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from flowtrain_lightning.checkpoint.local_shard import LocalShard, in_layout_of

NamedState = dict[str, Any]
"""``{"state": {parameter name: {...}}, "param_groups": [{..., "params": [names]}]}``."""


class NamedOptimizer:
    """Remembers which parameters the user gave to which group, on all ranks alike.

    The user's ``configure_optimizers`` runs on every rank with both halves. Parameters of an absent half are then
    dropped; groups that become empty stay, so that schedulers and settings per group line up.

    Attributes:
        groups: for each group the names of all its parameters, absent ones included, in the user's order.
    """

    def __init__(self, optimizer: Optimizer, module: nn.Module) -> None:
        self._optimizer = optimizer
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._parameters: dict[str, nn.Parameter] = {}
        self.groups: list[list[str]] = []
        self._take_groups()

    def state(self) -> NamedState:
        """This rank's state by name; the groups name all parameters."""
        self._take_groups()
        state = {name: self._optimizer.state.get(parameter, {}) for name, parameter in self._parameters.items()}
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
        numbers = {name: n for n, name in enumerate(self._parameters)}
        if len(by_name["param_groups"]) != len(self.groups):
            raise ValueError(
                f"The checkpoint's optimizer has {len(by_name['param_groups'])} parameter groups, but "
                f"configure_optimizers gives {len(self.groups)}. Use the same configure_optimizers as when it was "
                "saved."
            )
        groups = []
        for position, (settings, names) in enumerate(zip(by_name["param_groups"], self.groups, strict=True)):
            if changed := set(names) ^ set(settings["params"]):
                raise ValueError(
                    f"Group {position} of the checkpoint's optimizer and of configure_optimizers differ in "
                    f"{', '.join(sorted(changed))}. Use the same configure_optimizers as when it was saved."
                )
            # PyTorch goes by position: the numbers come in the order of this run's parameters.
            own = [numbers[name] for name in names if name in numbers]
            groups.append({**_settings(settings), "params": own})
        state = {
            numbers[name]: _in_layout(entries, self._parameters[name])
            for name, entries in by_name["state"].items()
            if name in numbers
        }
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
    """An optimizer's state by name. PyTorch numbers parameters through all groups in order."""
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
        entry: in_layout_of(value, parameter)
        if isinstance(value, Tensor | LocalShard) and value.shape and tuple(value.shape) == tuple(parameter.shape)
        else value
        for entry, value in entries.items()
    }


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _name(parameter: nn.Parameter, names: Mapping[int, str]) -> str:
    if id(parameter) not in names:
        raise ValueError(
            f"configure_optimizers gave the optimizer a parameter of shape {tuple(parameter.shape)} that is not a "
            "parameter of the module. Pass parameters of `self` only."
        )
    return names[id(parameter)]
