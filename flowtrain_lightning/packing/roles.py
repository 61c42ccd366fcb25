"""What the roles are called."""

from __future__ import annotations

from collections.abc import Collection

ENCODER = "encoder"
"""The role that turns media into features."""

BACKBONE = "backbone"
"""The role that reads tokens and features, and computes the loss."""

ROLES = (ENCODER, BACKBONE)
"""The names of the roles, in the order in which data flow through them."""


def encoder_of(modality: str, roles: Collection[str]) -> str:
    """The role among these that encodes a modality: ``encoder`` where there is one, else ``encoder_<modality>``."""
    return ENCODER if ENCODER in roles else f"{ENCODER}_{modality}"


def modality_of(role: str) -> str | None:
    """The one modality that a role encodes; None of ``encoder``, which takes whatever there is, and the backbone."""
    encoder, _, modality = role.partition("_")
    return modality if encoder == ENCODER and modality else None


def lane_of(role: str) -> str:
    """What a rank with this role does: ``encoder`` or ``backbone``."""
    return BACKBONE if role == BACKBONE else ENCODER
