"""The roles of a module and the edges between them: along each, rows of one modality flow, and their gradients back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

ENCODER = "encoder"
"""The role that turns media into features, unless a module names its roles otherwise."""

BACKBONE = "backbone"
"""The role that reads tokens and features and computes the loss, unless a module names its roles otherwise."""

GENERATOR = "generator"
"""The role that generates media from rows of the backbone's outputs, unless a module names its roles otherwise."""

GENERATED = "generated"
"""The modality of media items that are to be generated: nobody encodes them."""

ROLES = (ENCODER, BACKBONE)
"""The names of the roles of a module that names none, in the order in which data flow through them."""


class RoleError(ValueError):
    """Roles and edges contradict each other."""


class Edge(NamedTuple):
    """Rows that one role makes and another one reads; the gradients of these rows go back.

    Attributes:
        producer: makes the rows.
        consumer: reads them.
        modality: of the media that the producer encodes, or that the consumer generates; None where it takes whatever
            media there are.
    """

    producer: str
    consumer: str
    modality: str | None = None


@dataclass(frozen=True)
class RoleGraph:
    """The roles of a module, as its edges join them: every producer feeds the trunk, which computes the loss.

    A role behind the trunk reads rows of its outputs, and computes a loss of its own.

    Attributes:
        edges: of the graph, in the order in which producers are listed everywhere.

    Raises:
        RoleError: the edges lead to several roles, on from one to the next, or two producers encode one modality.
    """

    edges: tuple[Edge, ...]

    def __post_init__(self) -> None:
        read = [edge for edge in self.edges if edge.consumer == self.trunk]
        behind = [edge for edge in self.edges if edge.producer == self.trunk]
        if len(read) + len(behind) != len(self.edges) or {edge.producer for edge in read} & {*self.behind, self.trunk}:
            raise RoleError(
                f"The edges lead {self}. Let every edge lead from a role that encodes to one and the same role, which "
                "computes the loss, or from that role on to one that generates."
            )
        if len(behind) > 1:
            raise RoleError(
                f"The edges lead {self}, so that {len(behind)} of them leave {self.trunk!r}. One role may generate, "
                "media of one modality: put what several do into one."
            )
        named = [edge.modality for edge in read]
        several = len(read) > 1 and (None in named or len({*named}) < len(named))
        if several or {*named, None} & {edge.modality for edge in behind}:
            raise RoleError(f"The edges lead {self}. Give every edge a modality of its own, such as 'image'.")
        if len(self.producers) not in (1, len(read)):
            raise RoleError(
                f"The edges lead {self}. Where several roles encode, each has one modality: give each modality a role "
                "of its own."
            )

    def __str__(self) -> str:
        return ", ".join(f"from {edge.producer!r} to {edge.consumer!r}" for edge in self.edges) or "nowhere"

    @cached_property
    def trunk(self) -> str:
        """The role that reads what the others make, and computes the loss."""
        consumers = [edge.consumer for edge in self.edges]
        producing = {edge.producer for edge in self.edges}
        return next((role for role in consumers if role in producing), consumers[0] if consumers else "")

    @cached_property
    def producers(self) -> tuple[str, ...]:
        """The roles that encode."""
        return tuple(dict.fromkeys(edge.producer for edge in self.edges if edge.consumer == self.trunk))

    @cached_property
    def behind(self) -> tuple[str, ...]:
        """The roles that read rows of the trunk's outputs: one that generates, or none."""
        return tuple(edge.consumer for edge in self.edges if edge.producer == self.trunk)

    @property
    def roles(self) -> tuple[str, ...]:
        """All roles, in the order in which data flow through them."""
        return (*self.producers, self.trunk, *self.behind)

    @property
    def is_simple(self) -> bool:
        """One role encodes whatever media there are."""
        return len(self.producers) == 1

    def modality_of(self, role: str) -> str | None:
        """The modality that a role encodes or generates; None where one role encodes whatever there is."""
        if role not in self.behind:
            return None if self.is_simple else next(edge.modality for edge in self.edges if edge.producer == role)
        return next(edge.modality for edge in self.edges if edge.consumer == role)

    @cached_property
    def generated(self) -> frozenset[str]:
        """The modalities of media that are generated, and never encoded."""
        behind = (edge.modality for edge in self.edges if edge.producer == self.trunk)
        return frozenset(modality for modality in behind if modality is not None)

    def taker_of(self, modality: str) -> str:
        """The role that encodes media of a modality, or generates them.

        Raises:
            RoleError: none does.
        """
        generating = (role for role in self.behind if self.modality_of(role) == modality)
        return next(generating, None) or self.producer_of(modality)

    def maker_of(self, modality: str) -> str:
        """The role that makes the rows of a modality: it encodes such media, or hands on what they are generated from.

        Raises:
            RoleError: none does.
        """
        return self.trunk if modality in self.generated else self.producer_of(modality)

    def producer_of(self, modality: str) -> str:
        """The role that encodes a modality.

        Raises:
            RoleError: none does.
        """
        for producer in self.producers if modality not in self.generated else ():
            if self.modality_of(producer) in (None, modality):
                return producer
        encoded = ", ".join(repr(self.modality_of(producer)) for producer in self.producers)
        raise RoleError(f"No role encodes media of the modality {modality!r}; there are {encoded}.")


def graph_of(roles: Iterable[str], edges: Mapping[str, tuple[str, str]] | None = None) -> RoleGraph:
    """The graph of a module's roles.

    Args:
        roles: of the module.
        edges: modality -> who encodes it and who reads the features. None follows from the names: ``"encoder"``
            encodes whatever there is, ``"encoder_image"`` images, ``"backbone"`` reads it all, and ``"generator"``
            generates from rows of it.

    Raises:
        RoleError: the names say nothing, or edges and roles contradict each other.
    """
    named = tuple(roles)
    if not edges:
        return _graph_of_names(named)
    graph = RoleGraph(tuple(Edge(producer, consumer, modality) for modality, (producer, consumer) in edges.items()))
    if set(graph.roles) != set(named):
        raise RoleError(f"The edges lead {graph}, but the roles are {_listed(named)}. Give every role an edge.")
    return graph


def _graph_of_names(roles: tuple[str, ...]) -> RoleGraph:
    producers = [role for role in roles if role not in (BACKBONE, GENERATOR)]
    behind = (Edge(BACKBONE, GENERATOR, GENERATED),) if GENERATOR in roles else ()
    if producers == [ENCODER] and BACKBONE in roles:
        return RoleGraph((Edge(ENCODER, BACKBONE), *behind))
    modalities = [role.removeprefix(f"{ENCODER}_") for role in producers]
    if len(producers) < 2 or BACKBONE not in roles or modalities != [role[len(ENCODER) + 1 :] for role in producers]:
        raise RoleError(
            f"The roles are called {_listed(roles)}, which does not say what flows between them. Call them "
            f"{' and '.join(map(repr, ROLES))}, and what generates {GENERATOR!r}; where media of several modalities "
            "have an encoder each, as 'encoder_image' and 'encoder_audio', after the modality; or say it: "
            "edges = {'image': ('eye', 'trunk')}."
        )
    named = zip(producers, modalities, strict=True)
    return RoleGraph((*(Edge(role, BACKBONE, name) for role, name in named), *behind))


def _listed(roles: Iterable[str]) -> str:
    return ", ".join(map(repr, roles))
