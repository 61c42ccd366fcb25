"""The two halves of a module: how they are built, which parameters they own, and what may not be shared."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flowtrain_lightning.allocator import RoleGraph
from flowtrain_lightning.parallel.ranks.random_streams import enter_stream, own_streams
from flowtrain_lightning.parallel.tensor_plan import TensorPlan
from flowtrain_lightning.parallel.unfilled_weights import UnfilledWeights, build_without_weights
from flowtrain_lightning.parallel.weight_marks import keeping_marks

Halves = Mapping[str, tuple[str, ...]]
"""Role -> paths of the modules that its half is made of."""


class HeldStage(Protocol):
    """The part of a half that one stage holds; `StageCut` is one."""

    @property
    def stage(self) -> int:
        """The number of the stage."""

    @property
    def absent(self) -> Collection[str]:
        """Names of parameters and buffers that other stages hold."""

    @property
    def ties(self) -> tuple[str, ...]:
        """Names of parameters that the first and the last stage both hold."""

    def computes_elsewhere(self, path: str) -> bool:
        """Whether other stages hold all weights of a module of the half, of this path."""


class HalvedModule(Protocol):
    """A module whose halves can be built and placed by themselves; `FlowModule` is one."""

    halves: Halves

    @property
    def role_graph(self) -> RoleGraph:
        """The edges between the halves."""

    @property
    def builds_whole(self) -> bool:
        """Whether `configure_whole` builds both halves at once."""

    @property
    def held_stages(self) -> Mapping[str, HeldStage]:
        """Role -> the stage of it that this rank holds; without those of which it has all layers, or none."""

    def configure_whole(self) -> None:
        """Builds both halves."""

    def tensor_plan(self, role: str, ranks: int) -> TensorPlan:
        """Divides the layers of a half among tensor-parallel ranks."""

    def named_parameters(self, *, remove_duplicate: bool = ...) -> Iterator[tuple[str, nn.Parameter]]:
        """As of `torch.nn.Module`."""

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """As of `torch.nn.Module`."""

    def get_submodule(self, target: str) -> nn.Module:
        """As of `torch.nn.Module`."""

    def get_parameter(self, target: str) -> nn.Parameter:
        """As of `torch.nn.Module`."""

    def state_dict(self) -> Mapping[str, Any]:
        """As of `torch.nn.Module`."""

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = ...) -> Any:
        """As of `torch.nn.Module`."""


def build_halves(
    module: HalvedModule, resident: Collection[str], in_parts: Collection[str] = ()
) -> dict[str, UnfilledWeights]:
    """Builds every half: resident ones with their own random stream, the others without memory (meta device).

    A half's weights depend on the seed and its role alone, so they are equal on all layouts. A module that overrides
    ``configure_whole`` is built whole, from one stream, and gives up what is not resident afterwards.

    What reads weights while it builds them, as orthogonal parametrizations do, is built whole on every rank, too.

    Args:
        module: whose halves are built.
        resident: roles of this rank.
        in_parts: those of whose half this rank will hold a part only; they get no memory yet.

    Returns:
        role -> its weights, which are to be filled in when the layout is put onto the half. With ``configure_whole``
        all resident roles wait for that where one of them does.

    Raises:
        ValueError: a half names a module that was not built, or is called what no role is.
    """
    unfilled: dict[str, UnfilledWeights] = {}
    if module.builds_whole:
        weights = _build(module, module.configure_whole, ("weights",), without_weights=bool(in_parts))
        if weights is not None:
            unfilled = dict.fromkeys(resident, weights)
    else:
        for role in module.role_graph.roles:
            build, stream = _builder(module, role), ("weights", role)
            if role in resident:
                weights = _build(module, build, stream, without_weights=role in in_parts)
                if weights is not None:
                    unfilled[role] = weights
            else:
                _build_absent(module, role, build, stream)
    _refuse_missing_modules(module)
    drop_absent_roles(module, resident)
    return unfilled


def _build_absent(module: HalvedModule, role: str, build: Callable[[], None], stream: tuple[str, ...]) -> None:
    """Builds a half that other ranks hold: without memory, where that works."""
    try:
        with own_streams(), torch.device("meta"):
            build()
    except Exception as error:  # whatever the user's code does with numbers that are not there
        warnings.warn(
            f"Ranks without the {role} build it whole before they give it up: {type(module).__name__} reads weights "
            f"while it builds them ({type(error).__name__}: {error}). To save that memory, let configure_{role} create "
            "and write weights, and not read them back.",
            stacklevel=2,
        )
        _build(module, build, stream, without_weights=False)


def _builder(module: HalvedModule, role: str) -> Callable[[], None]:
    """The method that builds one half."""
    build: Callable[[], None] | None = getattr(module, f"configure_{role}", None)
    if build is None:
        raise NotImplementedError(f"{type(module).__name__} must define configure_{role}, or configure_whole.")
    return build


def _build(
    module: HalvedModule, build: Callable[[], None], stream: tuple[str, ...], *, without_weights: bool
) -> UnfilledWeights | None:
    assert isinstance(module, nn.Module)
    weights = build_without_weights(module, build, stream) if without_weights else None
    if weights is None:
        with own_streams():
            enter_stream(*stream)
            build()
    return weights


def fill_half(
    module: HalvedModule,
    role: str,
    weights: UnfilledWeights,
    device: torch.device,
    *,
    on_host: bool = False,
    keep: Callable[[nn.Parameter], None] | None = None,
    as_built_whole: bool = True,
) -> None:
    """Gives the weights of a half their numbers, and moves whatever else of it is a whole tensor to its device.

    Args:
        module: its half is in its layout.
        role: whose half it is.
        weights: of the half.
        device: where the half computes.
        on_host: its weights lie in host memory nevertheless.
        keep: see `UnfilledWeights.fill`.
        as_built_whole: see there.
    """
    assert isinstance(module, nn.Module)
    paths = module.halves[role]
    target = torch.device("cpu") if on_host else device
    wanted = partial(_is_under_and_here, paths=paths, absent=absent_names(module))
    weights.fill(module, wanted, target, keep, as_built_whole=as_built_whole)
    for tensor in half_tensors(module, role):
        if not isinstance(tensor, DTensor):
            tensor.data = tensor.data.to(device)


def drop_absent_roles(module: HalvedModule, resident: Collection[str]) -> None:
    """Leaves the halves that are not resident without memory. Tied parameters stay tied, on every rank alike."""
    named = module.named_parameters(remove_duplicate=False)
    first_names: dict[int, str] = {}
    names = {name: first_names.setdefault(id(parameter), name) for name, parameter in named}
    assert isinstance(module, nn.Module)
    with keeping_marks(module):
        for role in module.role_graph.roles:
            if role not in resident:
                for path in module.halves[role]:
                    module.get_submodule(path).to("meta")
        for name, first_name in names.items():
            if module.get_parameter(name) is not module.get_parameter(first_name):
                owner, _, own_name = name.rpartition(".")
                setattr(module.get_submodule(owner), own_name, module.get_parameter(first_name))


def half_parameters(module: HalvedModule, role: str) -> list[nn.Parameter]:
    """The parameters of one half, in the module's order."""
    paths = module.halves[role]
    return [parameter for name, parameter in module.named_parameters() if _is_under(name, paths)]


def held_parameters(module: HalvedModule, role: str) -> list[nn.Parameter]:
    """The parameters of one half that this rank's stage holds, in the module's order."""
    paths, absent = module.halves[role], absent_names(module)
    named = module.named_parameters()
    return [parameter for name, parameter in named if _is_under_and_here(name, paths, absent)]


def absent_parameters(module: HalvedModule, role: str) -> list[nn.Parameter]:
    """The parameters of one half that other stages hold."""
    held = {id(parameter) for parameter in held_parameters(module, role)}
    return [parameter for parameter in half_parameters(module, role) if id(parameter) not in held]


def half_tensors(module: HalvedModule, role: str) -> list[Tensor]:
    """Parameters and buffers of one half that this rank's stage holds, in the module's order."""
    paths, absent = module.halves[role], absent_names(module)
    buffers = [buffer for name, buffer in module.named_buffers() if _is_under_and_here(name, paths, absent)]
    return [*held_parameters(module, role), *buffers]


def half_trains(module: HalvedModule, role: str) -> bool:
    """Whether any parameter of the half wants a gradient. Equal on all ranks, also where the half is absent."""
    return any(parameter.requires_grad for parameter in half_parameters(module, role))


def check_halves(module: HalvedModule) -> None:
    """Refuses parameters that two halves share and parameters that no half owns.

    Raises:
        ValueError: with the parameters' names.
    """
    owners: dict[int, tuple[str, str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        role = role_of(name, module.halves)
        if role is None:
            raise ValueError(
                f"The parameter {name!r} of {type(module).__name__} lies on no half: the halves are "
                f"{ {half: list(paths) for half, paths in module.halves.items()} }. Put it under one of these "
                "modules, or name its module in `halves`."
            )
        first_name, first_role = owners.setdefault(id(parameter), (name, role))
        if first_role != role:
            raise ValueError(
                f"The parameters {first_name!r} ({first_role}) and {name!r} ({role}) are one tensor. Halves live on "
                "different ranks and cannot share weights: untie them, or put both into one half."
            )


def with_moved(module: HalvedModule, moved: Collection[str], role: str) -> Halves:
    """The halves of a module with some parts in another one. What held such a part is named by its other children.

    Args:
        module: is built.
        moved: paths of modules.
        role: whose half they belong to from now on.
    """

    def without(path: str) -> Iterator[str]:
        if path in moved:
            return
        if any(part.startswith(f"{path}.") for part in moved):
            for name, _ in module.get_submodule(path).named_children():
                yield from without(f"{path}.{name}")
        else:
            yield path

    kept = {half: tuple(each for path in paths for each in without(path)) for half, paths in module.halves.items()}
    return {**kept, role: (*kept[role], *moved)}


def role_of(name: str, halves: Mapping[str, Collection[str]]) -> str | None:
    """The role whose half owns the parameter or buffer of this name, or None."""
    return next((role for role, paths in halves.items() if _is_under(name, paths)), None)


@contextmanager
def without_absent_halves(module: HalvedModule, resident: Collection[str]) -> Iterator[None]:
    """Takes the halves without memory off the module, so that ``module.to(device)`` moves what is really there."""
    removed: list[tuple[nn.Module, str, nn.Module]] = []
    for role in module.role_graph.roles:
        if role in resident:
            continue
        for path in module.halves[role]:
            parent_path, _, name = path.rpartition(".")
            if not has_module(module, path):  # building it failed, and what follows on that must not hide why
                continue
            parent = module.get_submodule(parent_path)
            removed.append((parent, name, getattr(parent, name)))
            setattr(parent, name, None)
    try:
        yield
    finally:
        for parent, name, half in removed:
            setattr(parent, name, half)


def _refuse_missing_modules(module: HalvedModule) -> None:
    built = "configure_whole" if module.builds_whole else "configure_{}"
    for role in module.role_graph.roles:
        for path in module.halves[role]:
            if not has_module(module, path):
                raise ValueError(
                    f"{type(module).__name__} has no module {path!r}, where its {role} half should be. Build it in "
                    f"{built.format(role)}, or say in `halves` which modules the {role} is made of."
                )


def has_module(module: HalvedModule, path: str) -> bool:
    """Whether a module was built under this path."""
    try:
        module.get_submodule(path)
    except AttributeError:
        return False
    return True


def absent_names(module: HalvedModule) -> Collection[str]:
    """Names of parameters and buffers of this rank's halves that other stages hold."""
    return frozenset(name for stage in module.held_stages.values() for name in stage.absent)


def _is_under_and_here(name: str, paths: Collection[str], absent: Collection[str]) -> bool:
    return name not in absent and _is_under(name, paths)


def _is_under(name: str, paths: Collection[str]) -> bool:
    return any(name.startswith(f"{path}.") for path in paths)
