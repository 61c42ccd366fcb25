"""Whether packing changes what a module learns: packed equals alone, or it is refused by name."""

from flowtrain_lightning.compute.random_layers import dropout_settings
from flowtrain_lightning.packing_check.by_hand import check, report_of
from flowtrain_lightning.packing_check.check import CheckReport, check_packing
from flowtrain_lightning.packing_check.checked_module import NotCheckable
from flowtrain_lightning.packing_check.detached_copy import detached_copy
from flowtrain_lightning.packing_check.findings import (
    COUPLINGS,
    Coupling,
    Finding,
    PackingCheckError,
    refuse_unknown_couplings,
)

__all__ = [
    "COUPLINGS",
    "CheckReport",
    "Coupling",
    "Finding",
    "NotCheckable",
    "PackingCheckError",
    "check",
    "check_packing",
    "detached_copy",
    "dropout_settings",
    "refuse_unknown_couplings",
    "report_of",
]
