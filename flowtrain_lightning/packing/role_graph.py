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

ROLES = (ENCODER, BACKBONE)
"""The names of the roles of a module that names none, in the order in which data flow through them."""


class RoleError(ValueError):
    """Roles and edges contradict each other."""


class Edge(NamedTuple):
    """Rows that one role makes and another one reads; the gradients of these rows go back.

    Attributes:
        producer: makes the rows.
        consumer: reads them.
        modality: of the media that the producer encodes; None where it takes whatever media there are.
    """

    producer: str
    consumer: str
    modality: str | None = None


@dataclass(frozen=True)
class RoleGraph:
    """The roles of a module, as its edges join them: every producer feeds the trunk, which computes the loss.

    Attributes:
        edges: of the graph, in the order in which producers are listed everywhere.

    Raises:
        RoleError: the edges lead to several roles, on from one to the next, or two producers encode one modality.
    """

    edges: tuple[Edge, ...]

    def __post_init__(self) -> None:
        consumers = {edge.consumer for edge in self.edges}
        if len(consumers) != 1 or consumers & {edge.producer for edge in self.edges}:
            raise RoleError(
                f"The edges lead {self}. Let every edge lead from a role that encodes to one and the same role, which "
                "computes the loss."
            )
        named = [edge.modality for edge in self.edges]
        if len(self.edges) > 1 and (None in named or len(set(named)) < len(named)):
            raise RoleError(f"The edges lead {self}. Give every edge a modality of its own, such as 'image'.")
        if len(self.producers) not in (1, len(self.edges)):
            raise RoleError(
                f"The edges lead {self}. Where several roles encode, each has one modality: give each modality a role "
                "of its own."
            )

    def __str__(self) -> str:
        return ", ".join(f"from {edge.producer!r} to {edge.consumer!r}" for edge in self.edges) or "nowhere"

    @property
    def trunk(self) -> str:
        """The role that reads what the others make, and computes the loss."""
        return self.edges[0].consumer

    @cached_property
    def producers(self) -> tuple[str, ...]:
        """The roles that encode."""
        return tuple(dict.fromkeys(edge.producer for edge in self.edges))

    @property
    def roles(self) -> tuple[str, ...]:
        """All roles, in the order in which data flow through them."""
        return (*self.producers, self.trunk)

    @property
    def is_simple(self) -> bool:
        """One role encodes whatever media there are."""
        return len(self.producers) == 1

    def modality_of(self, producer: str) -> str | None:
        """The modality that a role encodes; None where one role encodes whatever there is."""
        return None if self.is_simple else next(edge.modality for edge in self.edges if edge.producer == producer)

    def producer_of(self, modality: str) -> str:
        """The role that encodes a modality.

        Raises:
            RoleError: none does.
        """
        for producer in self.producers:
            if self.modality_of(producer) in (None, modality):
                return producer
        encoded = ", ".join(repr(self.modality_of(producer)) for producer in self.producers)
        raise RoleError(f"No role encodes media of the modality {modality!r}; there are {encoded}.")


def graph_of(roles: Iterable[str], edges: Mapping[str, tuple[str, str]] | None = None) -> RoleGraph:
    """The graph of a module's roles.

    Args:
        roles: of the module.
        edges: modality -> who encodes it and who reads the features. None follows from the names: ``"encoder"``
            encodes whatever there is, ``"encoder_image"`` images, and ``"backbone"`` reads it all.

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
    producers = [role for role in roles if role != BACKBONE]
    if producers == [ENCODER] and BACKBONE in roles:
        return RoleGraph((Edge(ENCODER, BACKBONE),))
    modalities = [role.removeprefix(f"{ENCODER}_") for role in producers]
    if len(producers) < 2 or BACKBONE not in roles or modalities != [role[len(ENCODER) + 1 :] for role in producers]:
        raise RoleError(
            f"The roles are called {_listed(roles)}, which does not say what flows between them. Call them "
            f"{' and '.join(map(repr, ROLES))}; where media of several modalities have an encoder each, as "
            "'encoder_image' and 'encoder_audio', after the modality; or say it: edges = {'image': ('eye', 'trunk')}."
        )
    return RoleGraph(tuple(Edge(role, BACKBONE, name) for role, name in zip(producers, modalities, strict=True)))


def _listed(roles: Iterable[str]) -> str:
    return ", ".join(map(repr, roles))
