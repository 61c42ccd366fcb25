"""A profile: how long each half of a module takes on one device, as numbers and as a JSON file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowtrain_lightning.packing import CostModel
from flowtrain_lightning.packing.cost_model import Observation, predict

_FORMAT = "flowtrain profile 1"


class ProfileError(ValueError):
    """A profile cannot be made, read or written; the message says what to do."""


@dataclass(frozen=True)
class ProfileOrigin:
    """The origin of a profile: module, device and versions. Profiles of one origin may stand for each other.

    Attributes:
        module: the module's class and a fingerprint of its parameters' names, shapes, types and trainable flags.
        device: what it ran on.
        versions: package -> version.
        settings: what else decides how long a half takes: precision, threads, token budget.
    """

    module: str
    device: str
    versions: Mapping[str, str]
    settings: Mapping[str, str | int]


@dataclass(frozen=True)
class FlopModel:
    """FLOPs of one half by the lengths of what it computes, as cost models whose unit is a FLOP.

    Attributes:
        forward: of a forward.
        backward: of a backward, without what is computed again; all zero where no gradient is wanted.
    """

    forward: CostModel
    backward: CostModel

    def of(self, item: Observation) -> float:
        """FLOPs of what was measured, forward and backward."""
        return predict(self.forward, item) + predict(self.backward, item)


@dataclass(frozen=True)
class RoleProfile:
    """One half of the module on one device.

    Attributes:
        cost: seconds of forward and backward of one microbatch (by tokens) or one encoder batch (by patches); forward
            alone where no gradient is wanted. All zero where nothing was measured, as where no sample has media.
        trains: whether the half has parameters that train.
        parameters: numbers in all its weights.
        gradient_bytes: what a reduction over data-parallel ranks moves; 0 where the half is frozen.
        optimizer_seconds: of one optimizer step over the half's parameters.
        forward_share: the part of ``cost`` that is the forward, from 0 to 1.
        measured: what ``cost`` was fitted to.
        flops: what there was to compute; None where that could not be counted.
    """

    cost: CostModel
    trains: bool
    parameters: int
    gradient_bytes: int
    optimizer_seconds: float
    forward_share: float
    measured: tuple[Observation, ...]
    flops: FlopModel | None = None

    @property
    def flops_per_second(self) -> float | None:
        """FLOP/s over everything that was measured; None where nothing was, or FLOPs could not be counted."""
        if self.flops is None or not self.measured:
            return None
        return sum(map(self.flops.of, self.measured)) / sum(item.seconds for item in self.measured)

    @property
    def error(self) -> float:
        """The median relative error of ``cost`` on what was measured; 0 where nothing was."""
        errors = list(map(self.error_of, self.measured))
        return float(np.median(errors)) if errors else 0.0

    def error_of(self, item: Observation) -> float:
        """The relative error of ``cost`` on one of what was measured."""
        return abs(predict(self.cost, item) / item.seconds - 1)


@dataclass(frozen=True)
class ReductionCost:
    """Seconds in which data-parallel ranks sum their gradients: ``constant + seconds_per_byte * bytes``.

    Attributes:
        ranks: ranks among which it was measured.
        constant: seconds, however little is summed.
        seconds_per_byte: seconds for each byte of gradients.

    Raises:
        ValueError: fewer than 2 ranks, which sum nothing.
    """

    ranks: int
    constant: float
    seconds_per_byte: float

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise ValueError(f"a reduction is measured among at least 2 ranks, and not among {self.ranks}")

    def seconds(self, size: int, ranks: int | None = None) -> float:
        """Seconds in which ranks sum ``size`` bytes of gradients each, if the measured ranks did it as a ring does.

        Args:
            size: bytes; 0 takes no time.
            ranks: how many sum; None is as many as were measured.
        """
        ranks = self.ranks if ranks is None else ranks
        if ranks < 2 or not size:
            return 0.0
        hops = (ranks - 1) / (self.ranks - 1)
        moved = hops * self.ranks / ranks
        return self.constant * hops + self.seconds_per_byte * moved * size


@dataclass(frozen=True)
class Profile:
    """Times of a module's halves on one device.

    Attributes:
        origin: what was measured, where and with what.
        roles: role -> its half; those that encode first, then the trunk, such as the backbone, and what generates.
        feature_bytes: of one row of features, the largest; 0 where no sample has media.
        reduction: of gradients; None where it was not measured.
        whole: both halves fitted on the device together. Where they did not, each was measured with one and with two of
            its layers, and what a layer adds was counted for all of them.
        behind: the roles that generate.
    """

    origin: ProfileOrigin
    roles: Mapping[str, RoleProfile]
    feature_bytes: int
    reduction: ReductionCost | None = None
    whole: bool = True
    behind: tuple[str, ...] = ()

    @property
    def trunk(self) -> str:
        """The role that reads features and computes the loss."""
        return [role for role in self.roles if role not in self.behind][-1]

    @property
    def producers(self) -> tuple[str, ...]:
        """The roles that encode."""
        return tuple(role for role in self.roles if role not in (self.trunk, *self.behind))

    @property
    def cost(self) -> CostModel:
        """Seconds of a microbatch on the trunk: ``PackingConfig(cost=...)``."""
        return self.roles[self.trunk].cost

    @property
    def media_costs(self) -> dict[str, CostModel]:
        """Role -> seconds of a batch of its media items: ``PackingConfig(media_costs=...)``; of those with any."""
        return {role: of.cost for role, of in self.roles.items() if role != self.trunk and of.measured}


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile as JSON.

    Raises:
        ProfileError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps({"format": _FORMAT, **asdict(profile)}, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ProfileError(f"{path} cannot be written: {error}") from error


def read_profile(path: Path) -> Profile:
    """The profile in a file that `write_profile` wrote.

    Raises:
        ProfileError: the file cannot be read, is no profile, or is one that was changed into nonsense.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ProfileError(f"{path} cannot be read as a profile: {error}") from error
    found = content.get("format") if isinstance(content, Mapping) else None
    if found != _FORMAT:
        what = f"its format is {found!r}" if found else "it has no format"
        raise ProfileError(
            f"{path} is no profile that this version reads ({what}); write one with `flowtrain profile`."
        )
    try:
        return _profile(content)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ProfileError(f"{path} is a damaged profile: {reason}. Write it anew with `flowtrain profile`.") from error


def _profile(content: Mapping[str, Any]) -> Profile:
    origin, reduction = content["origin"], content["reduction"]
    return Profile(
        origin=ProfileOrigin(
            str(origin["module"]), str(origin["device"]), dict(origin["versions"]), dict(origin["settings"])
        ),
        roles=_roles(content["roles"]),
        feature_bytes=int(content["feature_bytes"]),
        reduction=None
        if reduction is None
        else ReductionCost(int(reduction["ranks"]), float(reduction["constant"]), float(reduction["seconds_per_byte"])),
        whole=bool(content["whole"]),
        behind=tuple(map(str, content.get("behind", ()))),
    )


def _roles(given: Mapping[str, Any]) -> dict[str, RoleProfile]:
    if len(given) < 2:
        raise ValueError(f"it has the roles {', '.join(given) or 'of no half'}, but needs one that encodes and a trunk")
    return {role: _role(values) for role, values in given.items()}


def _role(values: Mapping[str, Any]) -> RoleProfile:
    return RoleProfile(
        cost=CostModel(**values["cost"]),
        trains=bool(values["trains"]),
        parameters=int(values["parameters"]),
        gradient_bytes=int(values["gradient_bytes"]),
        optimizer_seconds=float(values["optimizer_seconds"]),
        forward_share=float(values["forward_share"]),
        measured=tuple(
            Observation(float(item["tokens"]), float(item["squares"]), float(item["seconds"]))
            for item in values["measured"]
        ),
        flops=None
        if (flops := values["flops"]) is None
        else FlopModel(CostModel(**flops["forward"]), CostModel(**flops["backward"])),
    )
