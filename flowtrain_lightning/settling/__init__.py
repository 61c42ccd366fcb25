"""Before roles are assigned: which allocation a run takes, and why."""

from flowtrain_lightning.settling.choice import TELLABLE, Choice
from flowtrain_lightning.settling.measuring import answer_if_wanted
from flowtrain_lightning.settling.request import Request, make_request
from flowtrain_lightning.settling.settle import Starting, remember, settle
from flowtrain_lightning.settling.settled import Plan, Settled
from flowtrain_lightning.settling.steps import part_of

__all__ = [
    "TELLABLE",
    "Choice",
    "Plan",
    "Request",
    "Settled",
    "Starting",
    "answer_if_wanted",
    "make_request",
    "part_of",
    "remember",
    "settle",
]
