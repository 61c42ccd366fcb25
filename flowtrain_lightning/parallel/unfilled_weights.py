"""The weights of a half that was built without them, on their way into whatever a layout made of the half."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from flowtrain_lightning.parallel.gradients import count_hooks
from flowtrain_lightning.parallel.noting import noting
from flowtrain_lightning.parallel.ranks.building_log import BuildingLog, NotedTensor, NotNotableError
from flowtrain_lightning.parallel.ranks.random_streams import enter_stream, own_streams
from flowtrain_lightning.parallel.regions import local_region, whole
from flowtrain_lightning.parallel.weight_marks import keeping_marks


class UnfilledWeights:
    """The weights of what ``build`` has built, none of which has memory yet.

    Args:
        module: gets new parameters from ``build``. All of them have shapes only afterwards (meta device); buffers and
            other tensors are there.
        build: a method of the module.
        stream: name of the random stream in which it is built.

    Raises:
        Exception: whatever comes of it that weights have no numbers, such as `NotNotableError`.
    """

    def __init__(self, module: nn.Module, build: Callable[[], None], stream: tuple[str, ...]) -> None:
        self._stream = stream
        self._log = BuildingLog(torch.get_default_device())
        before = list(module.parameters())
        with own_streams(), noting(self._log):
            enter_stream(*stream)
            build()
        self._hooked = [name for name, parameter in module.named_parameters() if any(count_hooks(parameter))]
        self._values: dict[str, NotedTensor | Tensor] = {}
        known = {id(parameter) for parameter in before}
        for name, parameter in list(module.named_parameters()):
            value = self._log.noted(parameter)
            if value is not None:
                self._values[name] = value
            elif id(parameter) not in known and not parameter.is_meta:
                self._values[name] = parameter.data
                empty = nn.Parameter(torch.empty_like(parameter.data, device="meta"), parameter.requires_grad)
                _replace(module, {id(parameter): empty})
        self._make_tables(module)

    def fill(
        self,
        module: nn.Module,
        wanted: Callable[[str], bool],
        device: torch.device,
        keep: Callable[[nn.Parameter], None] | None = None,
        *,
        as_built_whole: bool = True,
    ) -> None:
        """Gives weights their numbers: all of each, or what this rank holds of a DTensor.

        Beside these, host or device memory holds one weight at a time. Of a weight that was read from a file, this
        rank's part is read.

        Args:
            module: as it was built, perhaps put into a layout since.
            wanted: says which parameters by name.
            device: where they are to lie.
            keep: is called with each weight as soon as it has its numbers, and may give up some of them.
            as_built_whole: see `BuildingLog.make`.

        Raises:
            ValueError: a hook is on one of them, which would be lost.
        """
        if hooked := [name for name in self._hooked if wanted(name) and name in self._values]:
            raise ValueError(
                f"A hook was registered on the weight {hooked[0]!r} while its half was built, but where ranks hold "
                "parts of weights each of these is made anew once its part is known. Change gradients in the module's "
                "`on_before_optimizer_step`, or choose shard 'replicate', 'deepspeed-1' or 'deepspeed-2'."
            )
        filled: dict[int, nn.Parameter] = {}
        waiting: dict[int, list[tuple[NotedTensor, nn.Parameter]]] = defaultdict(list)

        def give(parameter: nn.Parameter, numbers: Tensor, dtype: torch.dtype) -> None:
            target = nn.Parameter(torch.empty_like(parameter.detach(), device=device), parameter.requires_grad)
            _take_part(target, numbers, dtype)
            if keep is not None:
                keep(target)
            filled[id(parameter)] = target

        for name, parameter in module.named_parameters():
            value = self._values.get(name)
            if value is None or not wanted(name):
                continue
            source = self._log.source(value) if isinstance(value, NotedTensor) else value
            if source is not None:
                give(parameter, source, value.dtype)
            elif isinstance(value, NotedTensor):
                waiting[value.memory].append((value, parameter))

        def take(memory: int, content: torch.UntypedStorage) -> None:
            for value, parameter in waiting[memory]:
                give(parameter, value.within(content), value.dtype)

        self._make([value for values in waiting.values() for value, _ in values], take, as_built_whole)
        _replace(module, filled)

    def _make(
        self,
        wanted: list[NotedTensor],
        take: Callable[[int, torch.UntypedStorage], None],
        as_built_whole: bool = True,
    ) -> None:
        if wanted:
            with own_streams(), torch.no_grad():
                enter_stream(*self._stream)
                self._log.make(wanted, take, as_built_whole)

    def _make_tables(self, module: nn.Module) -> None:
        """Gives tensors that are no parameters their numbers now, since they are small and moved with the module."""
        tables = list(_tables(module))
        noted = [value for owner, name in tables if (value := self._log.noted(getattr(owner, name))) is not None]
        contents: dict[int, torch.UntypedStorage] = {}
        self._make(noted, contents.__setitem__)
        for owner, name in tables:
            value = self._log.noted(getattr(owner, name))
            if value is not None:
                setattr(owner, name, value.within(contents[value.memory]))
        for owner in module.modules():
            for name, attribute in vars(owner).items():
                if not name.startswith("_") and any(self._log.noted(tensor) for tensor in _inside(attribute)):
                    raise NotNotableError(f"{type(owner).__name__}.{name} holds tensors that are no parameters")


def build_without_weights(
    module: nn.Module, build: Callable[[], None], stream: tuple[str, ...]
) -> UnfilledWeights | None:
    """Builds a part of a module without its weights; None, and a warning, where that does not work.

    Args:
        module: see `UnfilledWeights`.
        build: see there.
        stream: see there.
    """
    try:
        return UnfilledWeights(module, build, stream)
    except Exception as error:  # whatever the user's code does with numbers that are not there yet
        warnings.warn(
            f"Every rank builds the whole half of which it needs a part: {type(module).__name__} reads weights while "
            f"it builds them ({type(error).__name__}: {error}). To save that memory, let its configure methods create "
            "and write weights, and not read them back.",
            stacklevel=2,
        )
        return None


def _take_part(target: Tensor, source: Tensor, dtype: torch.dtype) -> None:
    """Copies what the target holds of the source, in the dtype in which the source was to be made."""
    with torch.no_grad():
        if isinstance(target, DTensor):
            region = local_region(target)
            target.to_local().copy_(source[region.within(whole(source.shape))].to(dtype))
        else:
            target.copy_(source.to(dtype))


def _replace(module: nn.Module, new: dict[int, nn.Parameter]) -> None:
    """Puts parameters in the place of others, wherever these stand: tied ones stay tied."""
    with keeping_marks(module):
        for owner in module.modules():
            for name, parameter in list(owner.named_parameters(recurse=False, remove_duplicate=False)):
                if id(parameter) in new:
                    setattr(owner, name, new[id(parameter)])


def _tables(module: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    """Owner and name of every tensor that is no parameter: buffers, and plain attributes."""
    for owner in module.modules():
        attributes = [name for name, value in vars(owner).items() if isinstance(value, Tensor)]
        for name in (*dict(owner.named_buffers(recurse=False, remove_duplicate=False)), *attributes):
            yield owner, name


def _inside(attribute: object) -> Collection[Tensor]:
    if isinstance(attribute, list | tuple):
        return [one for one in attribute if isinstance(one, Tensor)]
    if isinstance(attribute, dict):
        return [one for one in attribute.values() if isinstance(one, Tensor)]
    return []
