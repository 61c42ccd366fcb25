"""Losses of several roles: each is divided by its own count of the step, and all are joined in one report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from flowtrain_lightning.compute.joint_losses import JointLosses
from flowtrain_lightning.compute.step_metrics import StepReport
from flowtrain_lightning.packing import SampleSizes
from flowtrain_lightning.packing.role_graph import GENERATED, graph_of
from flowtrain_lightning.packing.step_members import StepMembers
from flowtrain_lightning.packing.step_planner import plan_step
from tests.packing.sizes import PATCHES_PER_ROW, make_sizes

ROLES = ("encoder", "backbone", "generator")
SIZES = replace(make_sizes((10, [2, 3]), (5, [4])), media_modality=np.array(["image", GENERATED, GENERATED]))
PLAN = plan_step(SIZES, np.arange(2), StepMembers(dict.fromkeys(ROLES, 1), graph_of(ROLES)), token_budget=100)
TARGETS, PATCHES, ROWS, WIDTH = 15, 7 * PATCHES_PER_ROW, 9, 12


ONE, TWO = torch.zeros(()), torch.zeros(2)


def losses(
    roles: tuple[str, ...] = ROLES,
    per_patch: int | None = None,
    counted: Callable[[SampleSizes], dict[str, int]] = lambda sizes: {},
    **weights: Any,
) -> JointLosses:
    module: Any = SimpleNamespace(
        role_graph=graph_of(roles), loss_weights=weights, values_per_patch=per_patch, loss_counts=counted
    )
    return JointLosses(module)


def rows(sizes: SampleSizes) -> dict[str, int]:
    return {"rows": int(sizes.media_rows.sum())}


def test_each_loss_is_divided_by_its_own_count_and_weighed():
    joint = losses(backbone=0.2)
    assert joint.gradient(ONE, PLAN, "backbone").item() == pytest.approx(0.2 / TARGETS)
    assert joint.gradient(ONE, PLAN, "generator", WIDTH).item() == pytest.approx(1 / (PATCHES * WIDTH))
    assert joint.scale(StepReport(0.0, TARGETS, False)) == 1.0


def test_values_of_latents_are_as_many_as_the_module_says():
    assert losses(per_patch=4).gradient(ONE, PLAN, "generator", WIDTH).item() == pytest.approx(1 / (PATCHES * 4))


def test_one_loss_is_divided_at_the_end():
    joint = losses(ROLES[:2])
    assert joint.gradient(ONE, PLAN, "backbone").item() == 1.0
    assert joint.scale(StepReport(0.0, 8, False)) == 1 / 8
    assert joint.scale(StepReport(0.0, 0.25, False)) == 4.0  # weights of targets may add up to less than one
    assert joint.scale(StepReport(0.0, 0, False)) == 1.0


@pytest.mark.parametrize("roles", [ROLES, ROLES[:2]])
def test_two_losses_of_the_backbone_are_each_divided_by_their_own_count(roles):
    joint = losses(roles, counted=rows, backbone=0.2, rows=3.0)
    assert joint.gradient(TWO, PLAN, "backbone").tolist() == pytest.approx([0.2 / TARGETS, 3.0 / ROWS])
    assert joint.scale(StepReport(0.0, TARGETS, False)) == 1.0


def test_a_step_reports_the_second_loss_of_the_backbone_by_name():
    of_trunk = StepReport(2.0, 6, False, losses={"rows": (5.0, ROWS)})
    joined = losses(ROLES[:2], counted=rows, rows=3.0).joined(of_trunk, {})
    assert (joined.loss, joined.tokens) == (2.0 + 3.0 * 5.0, 6)
    assert joined.losses == {"backbone": (2.0, 6), "rows": (5.0, ROWS)}


def test_a_step_reports_the_weighed_sum_and_each_loss():
    behind = {"generator": StepReport(3.0, 10, False, {"b": 2.0}, {"b": {}})}
    joined = losses(backbone=0.5).joined(StepReport(2.0, 6, True, {"a": 1.0}, {"a": {}}), behind)
    assert (joined.loss, joined.tokens, joined.stop) == (4.0, 6, True)
    assert joined.values == {"a": 1.0, "b": 2.0}
    assert joined.losses == {"backbone": (2.0, 6), "generator": (3.0, 10)}


def test_a_name_that_two_losses_log_is_refused():
    behind = {"generator": StepReport(3.0, 10, False, {"a": 2.0}, {"a": {}})}
    with pytest.raises(ValueError, match="'a' is logged with the loss of the backbone and with that of the generator"):
        losses().joined(StepReport(2.0, 6, True, {"a": 1.0}, {"a": {}}), behind)


@pytest.mark.parametrize(
    ("targets", "values", "words"),
    [
        (14, PATCHES * WIDTH, "counted 14 target tokens in a step in which 15 labels count"),
        (TARGETS, 5, f"counted 5 values in a step, but what is to be generated has {PATCHES * WIDTH}"),
    ],
)
def test_a_count_that_the_sizes_do_not_say_is_refused(targets, values, words):
    report = StepReport(1.0, targets, False, losses={"generator": (1.0, values)})
    with pytest.raises(ValueError, match=words):
        losses().refuse_other_counts(PLAN, report, {"generator": WIDTH})


def test_a_second_loss_over_another_count_than_was_said_is_refused():
    report = StepReport(1.0, TARGETS, False, losses={"rows": (1.0, 8)})
    with pytest.raises(ValueError, match="counted 8 terms of 'rows' in a step for which `loss_counts` says 9"):
        losses(ROLES[:2], counted=rows, rows=1.0).refuse_other_counts(PLAN, report, {})


@pytest.mark.parametrize("targets", [0, TARGETS])
def test_no_loss_at_all_and_the_count_of_all_are_right(targets):
    report = StepReport(1.0, targets, False, losses={"generator": (1.0, PATCHES * WIDTH)})
    losses().refuse_other_counts(PLAN, report, {"generator": WIDTH})


@pytest.mark.parametrize(
    ("roles", "weights", "words"),
    [
        (ROLES[:2], {"rows": 1.0}, "weighs a loss 'rows', which is that of no half and of which `loss_counts` says"),
        (ROLES, {"generatr": 1.0}, "weighs a loss 'generatr', which is that of no half"),
        (ROLES, {"counted": rows}, "loss_counts counts the terms of 'rows', to which loss_weights gives no weight"),
        (ROLES, {"encoder": 1.0}, "weighs the loss of 'encoder', but the module has the losses of 'backbone' and"),
        (
            ROLES[:2],
            {"backbone": 0.5},
            "weighs the loss of 'backbone', but the module has one loss, that of 'backbone'",
        ),
        (ROLES, {"backbone": -1.0}, "gives the backbone -1.0; give a number from 0 on"),
    ],
)
def test_weights_of_no_loss_are_refused(roles, weights, words):
    with pytest.raises(ValueError, match=words):
        losses(roles, **weights)
