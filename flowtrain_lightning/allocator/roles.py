"""The names of the roles, in the order in which data flow through them."""

ENCODER = "encoder"
"""Turns media into features."""

BACKBONE = "backbone"
"""Reads tokens and features, and computes the loss."""

ROLES = (ENCODER, BACKBONE)
