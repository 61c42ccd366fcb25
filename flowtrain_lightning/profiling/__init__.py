"""What a module and its data are measured to ask of a device: cost models, and lengths."""

from flowtrain_lightning.profiling.counting import count_flops
from flowtrain_lightning.profiling.data_profile import DataProfile, profile_data
from flowtrain_lightning.profiling.efficiency import measured_efficiencies
from flowtrain_lightning.profiling.errors import ProfileError
from flowtrain_lightning.profiling.measuring import profile_module
from flowtrain_lightning.profiling.origin import origin_of
from flowtrain_lightning.profiling.probes import load_probes
from flowtrain_lightning.profiling.profile import (
    Flops,
    Origin,
    Profile,
    Reduction,
    RoleProfile,
    read_profile,
    write_profile,
)

__all__ = [
    "DataProfile",
    "Flops",
    "Origin",
    "Profile",
    "ProfileError",
    "Reduction",
    "RoleProfile",
    "count_flops",
    "load_probes",
    "measured_efficiencies",
    "origin_of",
    "profile_data",
    "profile_module",
    "read_profile",
    "write_profile",
]
