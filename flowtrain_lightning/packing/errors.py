"""What packing refuses."""


class PackingError(ValueError):
    """What was asked for cannot be planned."""
