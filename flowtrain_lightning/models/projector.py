"""Projectors that train behind frozen towers: the tower hands its rows over, and the backbone half projects them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import ClassVar

from torch import Tensor, nn

from flowtrain_lightning.allocator import BACKBONE, ENCODER
from flowtrain_lightning.data import Features
from flowtrain_lightning.module import FlowModule
from flowtrain_lightning.parallel.halves import has_module, role_of, with_moved


class ProjectingModule(FlowModule):
    """A model in one piece, whose projector belongs to the half where it keeps nobody from working ahead.

    A subclass calls `place_projector` at the end of `configure_whole`, and `projected` in `merge`.

    Attributes:
        projector: paths of the modules of the encoder half that follow its tower, as far as a model has them. Where
            they train and the tower is frozen, they belong to the backbone half once the model is built: encoder ranks
            then compute with frozen weights alone, and work ahead of the backbone into later steps. A class that
            defines ``encode`` names them anew, and lets its tower run inside of `projector_apart`.
    """

    projector: ClassVar[tuple[str, ...]] = ()

    def place_projector(self) -> None:
        """Gives the projector to the backbone half, if it trains behind a frozen tower."""
        projector = [path for path in self.projector if has_module(self, path)]
        training = [name for name, weight in self.named_parameters() if weight.requires_grad]
        of_encoder = [name for name in training if role_of(name, self.halves) == ENCODER]
        trains_alone = bool(of_encoder) and all(role_of(name, {ENCODER: projector}) for name in of_encoder)
        if trains_alone and self._encode_knows_projector():
            self.halves = with_moved(self, projector, BACKBONE)

    def projector_apart(self) -> AbstractContextManager[None]:
        """For ``encode``. Inside, the tower hands over what its projector would be given, if `merge` projects it."""
        return _handing_over(self, self._apart, self.hand_over) if self._apart else nullcontext()

    def hand_over(self, hidden: Tensor) -> Tensor:
        """What the tower gives its projector -> the same with a row for each row of features."""
        return hidden

    def project(self, handed: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
        """What ``encode`` returned with the projector apart -> what it returns else."""
        projected: Tensor = self.get_submodule(self.projector[0])(handed)
        return projected

    def projected(self, features: Features) -> Features:
        """For `merge`: features as the decoder takes them, whichever half the projector belongs to."""
        return {modality: self.project(handed) if self._apart else handed for modality, handed in features.items()}

    @property
    def _apart(self) -> list[str]:
        """The modules of the projector that belong to the backbone half."""
        return [path for path in self.projector if path in self.halves[BACKBONE]]

    def _encode_knows_projector(self) -> bool:
        """Whether ``encode`` was not defined anew by a subclass of the class that names the projector."""
        names, encodes = (
            next(kind for kind in type(self).__mro__ if attribute in vars(kind))
            for attribute in ("projector", "encode")
        )
        return issubclass(names, encodes)


@contextmanager
def _handing_over(
    module: nn.Module, projector: Collection[str], hand_over: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Inside, what a tower gives its projector comes out as it is, since other ranks may have the projector.

    The projector is taken off the model for so long. Were it called here with another forward, ranks that share its
    weights would be asked for them.

    Args:
        module: is built.
        projector: paths of modules, or of lists of modules, that a tower calls with one tensor.
        hand_over: what comes out in place of what they would return.
    """
    taken: list[tuple[nn.Module, str, nn.Module]] = []
    for path in projector:
        parent_path, _, name = path.rpartition(".")
        parent, part = module.get_submodule(parent_path), module.get_submodule(path)
        taken.append((parent, name, part))
        alone = _HandsOver(hand_over)
        setattr(parent, name, nn.ModuleList([alone] * len(part)) if isinstance(part, nn.ModuleList) else alone)
    try:
        yield
    finally:
        for parent, name, part in taken:
            setattr(parent, name, part)


class _HandsOver(nn.Module):
    def __init__(self, hand_over: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._hand_over = hand_over

    def forward(self, hidden: Tensor) -> Tensor:
        return self._hand_over(hidden)
