"""Before roles are assigned: which allocation a run takes, and why."""

from flowtrain_lightning.placement.choice import TELLABLE, Choice
from flowtrain_lightning.placement.choose_allocation import LaunchContext, choose_allocation, remember
from flowtrain_lightning.placement.decision import PlacementDecision, Plan
from flowtrain_lightning.placement.measuring import answer_if_wanted
from flowtrain_lightning.placement.request import Request, make_request
from flowtrain_lightning.placement.steps import part_of

__all__ = [
    "TELLABLE",
    "Choice",
    "LaunchContext",
    "PlacementDecision",
    "Plan",
    "Request",
    "answer_if_wanted",
    "choose_allocation",
    "make_request",
    "part_of",
    "remember",
]
