"""Devices and clusters: peaks, memory and links, each with its source, and how much of the peaks is reached."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from typing import Any

from flowtrain_lightning.allocator.role_layout import PlanningError

GIB = 2.0**30

LAUNCH = 6.5e-6
"""Seconds in which eager code starts an operation: PyTorch's dispatcher with autograd takes 5 to 8 µs, by the host."""

TILE = 128
"""Side of the tile of a result that one processor computes at a time (NVIDIA, "Matrix multiplication background user's
guide", tile and wave quantization)."""


@dataclass(frozen=True)
class Device:
    """One accelerator, or one CPU process with one thread. Bandwidths are per device and for one direction.

    Attributes:
        name: what it is called.
        peak: FLOP/s of dense bf16 products, on paper.
        peak_float32: FLOP/s of float32 products, with TF32 where there is one.
        memory: bytes that the card reports: what is sold as 80 GB is more, since it is counted in powers of two.
        memory_bandwidth: bytes/s.
        link: bytes/s to devices of the same node.
        network: bytes/s to other nodes.
        per_node: devices of a node.
        units: processors that share a matrix product tile by tile (streaming multiprocessors, AI cores).
        dense: share of the peak that the best matrix product reaches.
        attention: share of the peak that fused attention reaches, forward and backward together.
        peak_float8: FLOP/s of dense fp8 products, on paper; None where there are none.
        host: bytes/s to and from the host's memory, as copies reach it.
        overhead: bytes that context, libraries and communication buffers take.
        launch: seconds in which its host starts an operation of eager code.
        cores: processors of its host that decode for it: clouds rent 8 to 26 beside a device.
        tile: numbers of a matrix product's result that a processor computes at a time.
        source: where the numbers are from.

    Raises:
        PlanningError: a number that is not above 0, or a share above 1.
    """

    name: str
    peak: float
    peak_float32: float
    memory: float
    memory_bandwidth: float
    link: float
    network: float
    per_node: int
    units: int
    dense: float
    attention: float
    peak_float8: float | None = None
    host: float = 50e9
    overhead: float = 2 * GIB
    launch: float = LAUNCH
    cores: float = 8
    tile: int = TILE**2
    source: str = "given by the user"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not value > 0:
                raise PlanningError(f"The device {self.name!r} has {field.name} {value}; it must be above 0.")
        for name in ("dense", "attention"):
            if getattr(self, name) > 1:
                raise PlanningError(f"The device {self.name!r} has {name} {getattr(self, name)}; a share is at most 1.")

    def peak_for(self, width: int) -> float:
        """FLOP/s on paper with numbers of ``width`` bytes."""
        if width < 2 and self.peak_float8 is not None:
            return self.peak_float8
        return self.peak if width <= 2 else self.peak_float32


@dataclass(frozen=True)
class Cluster:
    """Equal devices in equal nodes.

    Attributes:
        device: what they are.
        devices: how many in all.
        per_node: how many in a node.

    Raises:
        PlanningError: no devices, or they do not fill the nodes.
    """

    device: Device
    devices: int
    per_node: int

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise PlanningError(f"There are {self.devices} devices; a plan needs at least 1.")
        if self.per_node < 1 or (self.devices > self.per_node and self.devices % self.per_node):
            raise PlanningError(
                f"{self.devices} devices cannot be divided into nodes of {self.per_node}; every node must have as many."
            )


_MATMUL = "best product: ml-engineering, compute/accelerator, table of maximum achievable matmul FLOPS"
_FLASH_2 = "attention: FlashAttention-2, arXiv 2307.08691, section 4.1"

_BLACKWELL = 2 * TILE**2
"""Two processors compute one tile of 256 x 256 together (CUTLASS, "Blackwell SM100 GEMMs", 2-SM tcgen05.mma)."""

_CX7 = "network 8 x 400 Gb/s a node"

DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device(
            "a100", 312e12, 156e12, 85.1e9, 2.04e12, 300e9, 25e9, 8, 108, 0.869, 0.60,
            host=25e9,
            source=f"NVIDIA A100 80GB SXM data sheet; network 8 x 200 Gb/s a node; {_MATMUL}; {_FLASH_2}",
        ),
        Device(
            "a800", 312e12, 156e12, 85.1e9, 2.04e12, 200e9, 25e9, 8, 108, 0.869, 0.60,
            host=25e9,
            source="as the A100 with 400 GB/s of NVLink in both directions",
        ),
        Device(
            "h100", 989e12, 494e12, 85.5e9, 3.35e12, 450e9, 50e9, 8, 132, 0.803, 0.34,
            peak_float8=1979e12,
            source=f"NVIDIA H100 SXM data sheet; {_CX7}; {_MATMUL}; {_FLASH_2}",
        ),
        Device(
            "h200", 989e12, 494e12, 150.1e9, 4.8e12, 450e9, 50e9, 8, 132, 0.803, 0.34,
            peak_float8=1979e12,
            source=f"NVIDIA H200 SXM data sheet; {_CX7}; shares as for the H100",
        ),
        Device(
            "h800", 989e12, 494e12, 85.5e9, 3.35e12, 200e9, 50e9, 8, 132, 0.803, 0.34,
            peak_float8=1979e12,
            source="as the H100 with 400 GB/s of NVLink in both directions",
        ),
        Device(
            "h20", 148e12, 74e12, 102.0e9, 4.0e12, 450e9, 50e9, 8, 78, 0.90, 0.60,
            peak_float8=296e12,
            source="NVIDIA H20 data sheet; shares assumed: few FLOP/s for its memory, so nearly all are reached",
        ),
        Device(
            "l40s", 362e12, 183e12, 47.7e9, 0.864e12, 32e9, 12.5e9, 8, 142, 0.65, 0.45,
            peak_float8=733e12, host=25e9,
            source="NVIDIA L40S data sheet; links are PCIe 4.0 x16; network 2 x 400 Gb/s a node; shares assumed",
        ),
        Device(
            "b200", 2250e12, 1125e12, 191.5e9, 8.0e12, 900e9, 50e9, 8, 148, 0.776, 0.30,
            peak_float8=4500e12, tile=_BLACKWELL,
            source=f"NVIDIA B200 data sheet; {_CX7}; {_MATMUL}; attention assumed",
        ),
        Device(
            "b300", 2250e12, 1125e12, 287e9, 8.0e12, 900e9, 100e9, 8, 148, 0.776, 0.30,
            peak_float8=4500e12, tile=_BLACKWELL,
            source="NVIDIA HGX B300 data sheet; network 8 x 800 Gb/s a node; shares as for the B200",
        ),
        Device(
            "gb200", 2500e12, 1250e12, 197e9, 8.0e12, 900e9, 50e9, 64, 152, 0.776, 0.30,
            peak_float8=5000e12, host=200e9, tile=_BLACKWELL,
            source="NVIDIA GB200 NVL72 data sheet; 64 of its 72 make a node, so that degrees divide it; "
            "network 400 Gb/s each; shares as for the B200",
        ),
        Device(
            "mi300x", 1307e12, 654e12, 206.1e9, 5.3e12, 448e9, 50e9, 8, 304, 0.601, 0.30,
            peak_float8=2615e12,
            source=f"AMD Instinct MI300X data sheet; {_CX7}; {_MATMUL}; attention assumed",
        ),
        Device(
            "mi325x", 1307e12, 654e12, 274.9e9, 6.0e12, 448e9, 50e9, 8, 304, 0.601, 0.30,
            peak_float8=2615e12,
            source=f"AMD Instinct MI325X data sheet; {_CX7}; shares as for the MI300X",
        ),
        Device(
            "ascend-910b", 313e12, 78e12, 65.8e9, 1.6e12, 196e9, 25e9, 8, 20, 0.80, 0.40,
            host=25e9,
            source="peak and memory as FlowTrain (arXiv 2606.23087) reports; HCCS 7 x 28 GB/s; shares assumed",
        ),
        Device(
            "cpu", 494e9, 110e9, 8 * GIB, 20e9, 5e9, 1.25e9, 64, 1, 0.90, 0.30, host=20e9, overhead=0.63 * GIB,
            source="one thread of a server CPU with AMX, by torch's matrix products; memory and links assumed; "
            "overhead: a rank of the quickstart before it holds weights",
        ),
    )
}  # fmt: skip
"""Known devices by name."""


def named_device(name: str) -> Device:
    """A known device.

    Raises:
        PlanningError: there is none of that name.
    """
    if name not in DEVICES:
        near = get_close_matches(name, DEVICES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise PlanningError(
            f"There is no device {name!r}.{hint} Known are {', '.join(DEVICES)}; others come from a YAML file."
        )
    return DEVICES[name]


_OTHER_PEAKS = {"pcie", "nvl", "mig"}
"""Words in makers' names of cards and of slices of them, which have other peaks than the modules of `DEVICES`."""


def maker_device(name: str) -> Device | None:
    """The known device of which a maker's name speaks, as ``h100`` of ``NVIDIA H100 80GB HBM3``; None where none is."""
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    if words & _OTHER_PEAKS:
        return None
    return next((device for known, device in DEVICES.items() if known != "cpu" and known in words), None)


def device_from(values: Mapping[str, Any]) -> Device:
    """A device of the user's own.

    Args:
        values: the attributes of a `Device`. With ``like``, the name of a known device, what is left out is its.

    Raises:
        PlanningError: an attribute is missing, unknown or no number.
    """
    known = {field.name: field for field in fields(Device)}
    optional = {name for name, field in known.items() if field.default is not MISSING}
    given = {"source": "given by the user", **values}
    base = given.pop("like", None)
    if base is not None:
        given = {**vars(named_device(str(base))), **given}
    unknown = sorted(set(given) - set(known))
    missing = [name for name in known if name not in given and name not in optional]
    if unknown or missing:
        wrong = [f"has no {', '.join(unknown)}"] if unknown else []
        wrong += [f"needs {', '.join(missing)} too (or like: a known device)"] if missing else []
        raise PlanningError(f"A device {' and '.join(wrong)}. Its attributes are {', '.join(known)}.")
    for name, value in given.items():
        if name not in ("name", "source") and (value is not None or known[name].default is not None):
            given[name] = _number(name, value)
    given.update({name: int(given[name]) for name in ("per_node", "units", "tile") if name in given})
    return Device(**given)


def _number(name: str, value: Any) -> float:
    """A number; YAML reads 1e12 as text, since its own numbers need a dot."""
    try:
        return float(str(value) if isinstance(value, bool) else value)
    except (TypeError, ValueError) as error:
        raise PlanningError(f"The device's {name} is {value!r}; it must be a number.") from error


def fewest_nodes(devices: int, per_node: int, together: int = 1) -> int | None:
    """The number of equal nodes on which so many devices start, of which each has at most ``per_node``.

    Args:
        devices: of a plan.
        per_node: devices of a node.
        together: neighbours that are on one node, such as tensor ranks.

    Returns:
        The fewest, or None where there is no such number.
    """
    if devices <= per_node:
        return 1
    counts = range(-(-devices // per_node), devices + 1)
    return next((nodes for nodes in counts if devices % (nodes * together) == 0), None)
