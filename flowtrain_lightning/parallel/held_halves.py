"""The halves that one rank holds: which, how much of each, and whether their weights have numbers yet."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from torch import nn

from flowtrain_lightning.allocator import RoleError, RoleGraph, StageSchedule, graph_of
from flowtrain_lightning.parallel.halves import build_halves, check_halves, drop_absent_roles
from flowtrain_lightning.parallel.stages.stage_cut import StageCut, cut_half, drop_other_stages
from flowtrain_lightning.parallel.stages.stage_forward import StageForward
from flowtrain_lightning.parallel.tensor_plan import TensorPlan
from flowtrain_lightning.parallel.unfilled_weights import UnfilledWeights


class HeldHalves(nn.Module):
    """A module of named halves, some of which may live on other ranks, or in part there.

    Attributes:
        halves: for each half the paths of its modules.
        edges: modality -> the half that makes its rows and the half that reads them.
        reads_files: building reads the weights of all halves from files.
    """

    halves: Mapping[str, tuple[str, ...]]
    edges: Mapping[str, tuple[str, str]]

    def __init__(self) -> None:
        super().__init__()
        self._given_roles: tuple[str, ...] | None = None  # all
        self._in_parts: tuple[str, ...] = ()
        self._given_stages: Mapping[str, tuple[int, StageSchedule]] = {}
        self._staged: dict[str, StageForward] = {}
        self._built: tuple[str, ...] | None = None
        self._unfilled: dict[str, UnfilledWeights] = {}
        self.reads_files = False

    @property
    @abstractmethod
    def builds_whole(self) -> bool:
        """Whether `configure_whole` builds all halves at once."""

    @abstractmethod
    def configure_whole(self) -> None:
        """Builds all halves."""

    @abstractmethod
    def tensor_plan(self, role: str, ranks: int) -> TensorPlan:
        """Divides the layers of a half among tensor-parallel ranks."""

    @property
    def role_graph(self) -> RoleGraph:
        """The edges between the halves.

        Raises:
            RoleError: neither their names nor ``edges`` say it.
        """
        try:
            return graph_of(self.halves, self.edges)
        except RoleError as error:
            raise RoleError(f"The halves of {type(self).__name__}: {error}") from error

    def build_held(self) -> None:
        """Builds the halves that live on this rank, and the others without memory.

        Raises:
            RuntimeError: another half is needed than the module was built with on this rank.
        """
        if self._built is None or self._unfilled:
            self._unfilled = build_halves(self, self._local_roles, self._built_in_parts)
            check_halves(self)
            self._built = self._local_roles
        elif not set(self._local_roles) <= set(self._built):
            raise RuntimeError(
                f"This {type(self).__name__} was built on a rank that holds {', '.join(self._built)} only, but is now "
                f"needed with {', '.join(self._local_roles)}. Load it from a checkpoint: "
                f"{type(self).__name__}.load_from_checkpoint(PATH)."
            )
        self._cut_stages()

    @property
    def _local_roles(self) -> tuple[str, ...]:
        """The roles whose halves this rank holds."""
        return self.role_graph.roles if self._given_roles is None else self._given_roles

    def set_local_roles(
        self,
        roles: tuple[str, ...] | None,
        in_parts: tuple[str, ...] = (),
        stages: Mapping[str, tuple[int, StageSchedule]] | None = None,
    ) -> None:
        """The strategy says which halves this rank holds (None: all), and of which of them a part only.

        Args:
            roles: of this rank.
            in_parts: those of which it holds a part only.
            stages: role -> which stage of it this rank holds, and all of them; without roles that are not in stages.
        """
        self._given_roles, self._in_parts, self._given_stages = roles, in_parts, stages or {}

    @property
    def staged(self) -> Mapping[str, StageForward]:
        """Role -> runs the stage of it that this rank holds; without those of which it has all layers, or none."""
        return self._staged

    @property
    def held_stages(self) -> Mapping[str, StageCut]:
        """Role -> the part of it that this rank's stage holds."""
        return {role: staged.cut for role, staged in self._staged.items()}

    def _cut_stages(self) -> None:
        """Gives up what other stages hold.

        Raises:
            RuntimeError: it was cut for another stage before.
        """
        for role, cut in self.held_stages.items():
            if cut.place != self._given_stages.get(role) and role in self._local_roles:
                raise RuntimeError(
                    f"This {type(self).__name__} holds stage {cut.stage} of {cut.stages} of the {role} of an earlier "
                    "run, but other layers are needed now. Load it from a checkpoint: "
                    f"{type(self).__name__}.load_from_checkpoint(PATH)."
                )
        for role, given in self._given_stages.items():
            if role not in self._staged:
                cut = cut_half(self, role, *given)
                drop_other_stages(self, cut)
                self._staged[role] = StageForward(self, cut)

    @property
    def holds_parts(self) -> bool:
        """Whether this rank will hold a part only of what is built, so that weights are built without memory."""
        return bool(self._built_in_parts)

    @property
    def _built_in_parts(self) -> tuple[str, ...]:
        """The roles whose weights are built without memory.

        Where files hold those of all halves, a rank that lacks one would read it too, if they lie there otherwise than
        the module has them.
        """
        lacks = not set(self._local_roles) >= set(self.role_graph.roles)
        return self._local_roles if lacks and self.reads_files else self._in_parts

    @property
    def unfilled(self) -> Mapping[str, UnfilledWeights]:
        """Role -> the weights of a half that is built, but has no memory yet."""
        return self._unfilled

    def mark_filled(self) -> None:
        """The strategy says that all halves have their weights."""
        self._unfilled = {}

    def drop_absent_roles(self) -> None:
        """Before others train them: what this rank had of them, if it was whole, would become stale."""
        drop_absent_roles(self, self._local_roles)
        self._cut_stages()
        self._built = self._local_roles
