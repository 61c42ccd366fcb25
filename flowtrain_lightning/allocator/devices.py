"""Devices and clusters: peaks, memory and links, each with its source, and how much of the peaks is reached."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

from flowtrain_lightning.allocator.allocation import PlanningError

GIB = 2.0**30


@dataclass(frozen=True)
class Device:
    """One accelerator, or one CPU process with one thread. Bandwidths are per device and for one direction.

    Attributes:
        name: what it is called.
        peak: FLOP/s of dense bf16 products, on paper.
        peak_float32: FLOP/s of float32 products, with TF32 where there is one.
        memory: bytes.
        memory_bandwidth: bytes/s.
        link: bytes/s to devices of the same node.
        network: bytes/s to other nodes.
        per_node: devices of a node.
        units: processors that share a matrix product tile by tile (streaming multiprocessors, AI cores).
        dense: share of the peak that the best matrix product reaches.
        attention: share of the peak that fused attention reaches, forward and backward together.
        overhead: bytes that context, libraries and communication buffers take.
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
    overhead: float = 2 * GIB
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


@dataclass(frozen=True)
class Efficiency:
    """Shares of a device's peaks that one role's computing reaches: assumed, or fitted to a profile.

    Attributes:
        dense: of the peak FLOP/s, by a large matrix product.
        attention: of the peak FLOP/s, by fused attention.
        memory: of the memory bandwidth, by what moves data and hardly computes.
        exchange: of links and network, by collectives.
        launch: seconds that starting a layer's kernels takes, forward; twice that backward. Where kernels are shorter
            than that, starting them is what takes the time.
        latency: seconds that a collective takes however little it moves.
        slack: time of a pass over the time of its kernels and collectives: gaps, stragglers, what is not modelled.
    """

    dense: float
    attention: float
    memory: float = 0.8
    exchange: float = 0.8
    launch: float = 60e-6
    latency: float = 15e-6
    slack: float = 1.1


def assumed_efficiency(device: Device) -> Efficiency:
    """The device's own shares; assumed are 80 % of bandwidths, 15 kernels of 4 µs a layer, 15 µs a collective.

    The slack is what one printed figure shows beyond the sum of its parts: 4.068 s for a step of a 7B language model
    alone (DIP, arXiv 2504.14145, section 2; ``benchmarks/published.py`` holds that figure out).
    """
    return Efficiency(dense=device.dense, attention=device.attention)


_MATMUL = "best product: ml-engineering, compute/accelerator, table of maximum achievable matmul FLOPS"
_FLASH_2 = "attention: FlashAttention-2, arXiv 2307.08691, section 4.1"

DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device(
            "a100", 312e12, 156e12, 80e9, 2.04e12, 300e9, 25e9, 8, 108, 0.869, 0.60,
            source=f"NVIDIA A100 80GB SXM data sheet; network 8 x 200 Gb/s a node; {_MATMUL}; {_FLASH_2}",
        ),
        Device(
            "h100", 989e12, 494e12, 80e9, 3.35e12, 450e9, 50e9, 8, 132, 0.803, 0.34,
            source=f"NVIDIA H100 SXM data sheet; network 8 x 400 Gb/s a node; {_MATMUL}; {_FLASH_2}",
        ),
        Device(
            "h200", 989e12, 494e12, 141e9, 4.8e12, 450e9, 50e9, 8, 132, 0.803, 0.34,
            source="NVIDIA H200 SXM data sheet; network 8 x 400 Gb/s a node; shares as for the H100",
        ),
        Device(
            "h800", 989e12, 494e12, 80e9, 3.35e12, 200e9, 50e9, 8, 132, 0.803, 0.34,
            source="as the H100 with 400 GB/s of NVLink in both directions",
        ),
        Device(
            "h20", 148e12, 74e12, 96e9, 4.0e12, 450e9, 50e9, 8, 78, 0.90, 0.60,
            source="NVIDIA H20 data sheet; shares assumed: few FLOP/s for its memory, so nearly all are reached",
        ),
        Device(
            "b200", 2250e12, 1125e12, 180e9, 8.0e12, 900e9, 50e9, 8, 148, 0.776, 0.30,
            source=f"NVIDIA B200 data sheet; network 8 x 400 Gb/s a node; {_MATMUL}; attention assumed",
        ),
        Device(
            "mi300x", 1307e12, 654e12, 192e9, 5.3e12, 448e9, 50e9, 8, 304, 0.601, 0.30,
            source=f"AMD Instinct MI300X data sheet; network 8 x 400 Gb/s a node; {_MATMUL}; attention assumed",
        ),
        Device(
            "ascend-910b", 313e12, 78e12, 64e9, 1.6e12, 196e9, 25e9, 8, 20, 0.80, 0.40,
            source="peak and memory as FlowTrain (arXiv 2606.23087) reports; HCCS 7 x 28 GB/s; shares assumed",
        ),
        Device(
            "cpu", 494e9, 110e9, 8 * GIB, 20e9, 5e9, 1.25e9, 64, 1, 0.90, 0.30, overhead=0.63 * GIB,
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
    given = {"source": "given by the user", **values}
    base = given.pop("like", None)
    if base is not None:
        given = {**vars(named_device(str(base))), **given}
    unknown = sorted(set(given) - set(known))
    missing = [name for name in known if name not in given and name != "overhead"]
    if unknown or missing:
        wrong = [f"has no {', '.join(unknown)}"] if unknown else []
        wrong += [f"needs {', '.join(missing)} too (or like: a known device)"] if missing else []
        raise PlanningError(f"A device {' and '.join(wrong)}. Its attributes are {', '.join(known)}.")
    for name, value in given.items():
        if name not in ("name", "source"):
            given[name] = _number(name, value)
    given["per_node"], given["units"] = int(given["per_node"]), int(given["units"])
    return Device(**given)


def _number(name: str, value: Any) -> float:
    """A number; YAML reads 1e12 as text, since its own numbers need a dot."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise PlanningError(f"The device's {name} is {value!r}; it must be a number.") from error
