"""What planning refuses."""


class PlanningError(ValueError):
    """There is no plan for what was given; the message says why and what would do."""
