"""The cost models that steps are packed by: given one by one, or found in a profile."""

from __future__ import annotations

import json
from pathlib import Path

from flowtrain_lightning.data.records import DataError
from flowtrain_lightning.packing import CostModel

Costs = tuple[CostModel | None, CostModel | None]
"""Of the backbone and of the encoder; None where nothing is known."""


def chosen_costs(cost: CostModel | None, encoder_cost: CostModel | None, profile: str | Path | None) -> Costs:
    """What the user chose: those of a profile, or those given.

    Raises:
        ValueError: both a profile and a cost model are given.
        DataError: the profile cannot be read.
    """
    if profile is None:
        return cost, encoder_cost
    if cost is not None or encoder_cost is not None:
        name = "encoder_cost" if cost is None else "cost"
        raise ValueError(f"profile={str(profile)!r} brings cost models, but {name} was given as well; leave one out.")
    return _costs_in(Path(profile))


def _costs_in(path: Path) -> Costs:
    try:
        roles = json.loads(path.read_text(encoding="utf-8"))["roles"]
        cost, encoder_cost = (CostModel(**roles[role]["cost"]) for role in ("backbone", "encoder"))
    except OSError as error:
        raise DataError(f"The profile {path} cannot be read: {error}") from error
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"{path} holds no cost models, as a profile does; write one with `flowtrain profile`."
        ) from error
    # An encoder that no sample needed was not measured.
    return cost, encoder_cost if encoder_cost != CostModel(0.0, 0.0, 0.0) else None
