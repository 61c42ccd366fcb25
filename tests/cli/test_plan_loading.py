"""What a plan says of decoding: the cores that its steps ask of hosts, in time to give loaders processes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flowtrain_lightning.allocator import ENCODER, ModelledCosts, named_device, named_model
from flowtrain_lightning.allocator.modelled_plan import ModelledPlan
from flowtrain_lightning.cli.plan_loading import (
    DECODING,
    cores_for_pictures,
    held_up_by_loading,
    loading_warning,
    workers_for,
)
from tests.allocator.problems import problems


@pytest.fixture(scope="module")
def asked():
    return problems("qwen2-vl-2b", frozen=("encoder",))


@pytest.fixture(scope="module")
def plans(asked) -> dict[str, ModelledPlan]:
    return {plan.kind: plan for plan in ModelledCosts(asked).predictions()}


def test_a_rank_decodes_the_pixels_that_it_encodes(asked, plans):
    module, plan = named_model("qwen2-vl-2b"), plans["separate"]
    pixels = asked[ENCODER].load.tokens * 14 * 14 / plan.chosen[ENCODER].layout.data
    assert cores_for_pictures(plan, asked, module) == pytest.approx(pixels * DECODING / plan.seconds)


def test_where_steps_are_shorter_as_much_more_is_asked_of_hosts(asked, plans):
    module, plan = named_model("qwen2-vl-2b"), plans["uniform"]
    cores = cores_for_pictures(plan, asked, module)
    assert cores_for_pictures(replace(plan, seconds=plan.seconds / 10), asked, module) == pytest.approx(10 * cores)


def test_sounds_and_texts_are_not_decoded_as_pictures(asked, plans):
    assert cores_for_pictures(plans["uniform"], asked, replace(named_model("qwen2-vl-2b"), encoders={})) is None
    assert cores_for_pictures(plans["uniform"], asked, named_model("qwen2-audio-7b")) is None


def test_loaders_have_processes_where_a_quarter_of_a_core_is_needed():
    assert [workers_for(cores) for cores in (0.1, 0.25, 0.8, 3.0)] == [0, 1, 2, 4]


def test_steps_that_no_host_can_load_for_are_told():
    device = named_device("h100")
    assert loading_warning(device.cores, device) is None
    assert "each rank needs about 17 cores" in loading_warning(16.5, device)
    assert "2.1 times as long" in loading_warning(16.5, device)


def test_a_step_takes_as_long_as_hosts_decode_and_no_longer(asked, plans):
    module, plan = named_model("qwen2-vl-2b"), plans["separate"]
    assert held_up_by_loading(plan, asked, module) is plan, "these hosts keep up"
    cores = cores_for_pictures(plan, asked, module)
    few = with_cores(asked, cores / 3)
    slow = held_up_by_loading(plan, few, module)
    assert slow.seconds == pytest.approx(3 * plan.seconds)
    assert slow.samples_per_second == pytest.approx(plan.samples_per_second / 3)
    assert cores_for_pictures(slow, few, module) == pytest.approx(cores), "what it takes to keep up stays"


def with_cores(asked, cores):
    """The same on devices beside which so many cores decode."""
    device = replace(named_device("h100"), cores=cores)
    return asked.on(replace(asked.cluster, device=device))
