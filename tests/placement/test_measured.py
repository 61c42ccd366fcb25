"""How long a step takes on an allocation, by hand, and which allocations are looked at."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flowtrain_lightning.allocator import NoPlanError, RoleLayout, choose_placement, default_allocation
from flowtrain_lightning.packing import PackingError, StepPlan
from flowtrain_lightning.placement.measured import (
    MeasuredCosts,
    MeasuredPrediction,
    Processors,
    predict_steps,
    search_splits,
    short_name,
)
from tests.packing.sizes import make_sizes
from tests.placement.profiles import make_profile

SIZES = make_sizes((9, [1]), (9, [1]))
"""Two samples of 10 tokens with 4 patches each."""
ALONE = Processors(((0, 1),), 2.0)


def array(*numbers):
    return np.array(numbers, dtype=np.int64)


def alike(batches):
    """The same batches of samples and of their pictures."""
    return {"backbone": batches, "encoder": batches}


SEPARATE = StepPlan(array(0, 1), SIZES, alike(((array(0), array(1)),)))
COLOCATED = StepPlan(array(0, 1), SIZES, alike(((array(0),), (array(1),))))
APART, TOGETHER = default_allocation(2, "separate"), default_allocation(2, "colocated")


def seconds(plan, allocation, profile, processors=ALONE):
    return predict_steps([plan], allocation, profile, processors, 4).seconds


def test_colocated_ranks_do_one_thing_after_another():
    assert seconds(COLOCATED, TOGETHER, make_profile(1.0, 1.0)) == 10 + 4


def test_separate_ranks_wait_for_the_first_features_and_the_last_gradients():
    # First forward (a quarter of 4), both microbatches, then the last encoder batch's backward.
    assert seconds(SEPARATE, APART, make_profile(1.0, 1.0)) == 1 + 20 + 3


def test_where_the_encoder_does_the_most_the_backbone_waits():
    found = predict_steps([SEPARATE], APART, make_profile(10.0, 1.0), ALONE, 4)
    assert found.seconds == 80  # two batches of 40 s; one's forward hides the other's microbatch
    assert found.idle == {"encoder": 0.0, "backbone": 0.75}
    assert found.samples_per_second == 2 / 80


def test_a_frozen_encoder_works_ahead_and_only_its_forward_counts():
    profile = make_profile(5.0, 1.0, trains=False)
    assert seconds(SEPARATE, APART, profile) == 2 * 20  # its cost is the forward's alone
    assert seconds(SEPARATE, APART, make_profile(2.0, 1.0, trains=False)) == 2 * 10


def test_each_rank_ends_with_the_optimizers_and_reductions_of_its_roles():
    profile = make_profile(1.0, 1.0, optimizer=2.0, reduction=5.0)
    assert seconds(COLOCATED, TOGETHER, profile) == 14 + 2 * (2 + 5)
    assert seconds(SEPARATE, APART, profile) == 24 + 2


def test_ranks_that_share_a_processor_take_at_least_the_time_of_all_their_work():
    crowded = Processors(((0, 1),), 1.0)
    assert seconds(COLOCATED, TOGETHER, make_profile(1.0, 1.0), processors=crowded) == 28
    assert seconds(SEPARATE, APART, make_profile(1.0, 1.0), processors=crowded) == 28


def test_ranks_on_devices_of_their_own_do_not_share():
    apart = Processors(((0,), (1,)), 1.0)
    assert seconds(COLOCATED, TOGETHER, make_profile(1.0, 1.0), processors=apart) == 14


def costs(profile, ranks=2, nodes=1, impossible=(), rank_bytes=None, ranks_per_device=1):
    """Costs of a run whose steps are all alike; some numbers of encoder ranks cannot be dealt steps."""

    def plan_steps(allocation, count):
        backbones, encoders = (len(allocation.ranks[role]) for role in ("backbone", "encoder"))
        if allocation.placement == "separate" and encoders in impossible:
            raise PackingError("these ranks cannot be dealt the steps")
        shares = {
            "backbone": np.array_split(np.arange(2), backbones),
            "encoder": np.array_split(np.arange(2), encoders),
        }
        batches = {role: tuple((one,) for one in share) for role, share in shares.items()}
        return [StepPlan(array(0, 1), SIZES, batches)] * count

    everyone = Processors(tuple((rank,) for rank in range(ranks)), 1.0)
    return MeasuredCosts(profile, plan_steps, ranks, everyone, 4, nodes, ranks_per_device, rank_bytes)


def test_all_splits_of_a_few_ranks_are_predicted():
    names = [each.name for each in costs(make_profile(1.0, 1.0), ranks=4).predictions()]
    splits = ("1 + 3", "2 + 2", "3 + 1")
    assert names == ["colocated x4", *(f"{kind} {split}" for kind in ("separate", "mixed") for split in splits)]


def test_ranks_that_share_a_device_have_one_role_each():
    names = [each.name for each in costs(make_profile(1.0, 1.0), ranks=4, ranks_per_device=2).predictions()]
    assert names == ["separate 1 + 3", "separate 2 + 2", "separate 3 + 1"]


def test_on_several_nodes_the_last_ranks_of_each_encode():
    separate = costs(make_profile(1.0, 1.0), ranks=4, nodes=2).predictions()[2]
    assert separate.allocation.ranks["encoder"] == (1, 3)


def test_halves_that_did_not_fit_together_are_not_planned_on_the_same_ranks():
    profile = make_profile(1.0, 1.0)
    assert {each.kind for each in costs(profile).predictions()} == {"colocated", "separate", "mixed"}
    choice = choose_placement(costs(replace(profile, whole=False)))
    assert [each.kind for each in choice.predictions] == ["separate"]
    assert "the fastest that is possible" in choice.reason


def of_bytes(encoder, backbone):
    """A profile of halves that keep so many bytes of weights, gradients and optimizer, in float32."""
    profile = make_profile(1.0, 1.0)
    sizes = {"encoder": encoder // 16, "backbone": backbone // 16}
    roles = {role: replace(half, parameters=sizes[role]) for role, half in profile.roles.items()}
    return replace(profile, roles=roles, whole=False)


def layouts_that_fit(profile, ranks, rank_bytes):
    found = costs(profile, ranks=ranks, rank_bytes=rank_bytes).predictions()
    return {each.name: costs(profile, ranks).kept_bytes(each.allocation) for each in found}


def test_where_whole_copies_do_not_fit_the_backbone_is_sharded_first():
    assert layouts_that_fit(of_bytes(160, 1600), 4, 600) == {
        "colocated x4, backbone in shards": 160 + 400,
        "separate 1 + 3, backbone in shards": 1600 / 3,
    }


def test_mixed_ranks_may_shard_the_backbone_but_no_encoder_over_both_kinds_of_ranks():
    assert "mixed 1 + 3, backbone in shards" in layouts_that_fit(of_bytes(160, 1600), 4, 800)
    assert not any(name.startswith("mixed") for name in layouts_that_fit(of_bytes(1600, 1600), 2, 1800))


def test_both_halves_are_sharded_where_nothing_less_fits():
    assert layouts_that_fit(of_bytes(1600, 1600), 2, 1800)["colocated x2, encoder and backbone in shards"] == 1600


def test_a_frozen_backbone_is_not_sharded_beside_an_encoder_that_trains():
    profile = of_bytes(160, 16000)
    frozen = replace(profile.roles["backbone"], trains=False)
    profile = replace(profile, roles={**profile.roles, "backbone": frozen})
    with pytest.raises(NoPlanError, match="or the halves do not fit"):
        costs(profile, ranks=4, rank_bytes=2000).predictions()


def test_what_fits_in_no_layout_is_said_to():
    with pytest.raises(NoPlanError, match="or the halves do not fit"):
        costs(of_bytes(1600, 1600), ranks=2, rank_bytes=1000).predictions()


def test_ranks_with_shards_wait_for_the_slowest_at_every_microbatch():
    uneven = make_sizes((9, [1]), (29, [1]), (29, [1]), (9, [1]))
    batches = {"backbone": ((array(0), array(1)), (array(2), array(3))), "encoder": ((array(),), (array(),))}
    plan = StepPlan(array(0, 1, 2, 3), uneven, batches)
    sharded = TOGETHER.with_roles({"backbone": RoleLayout(shard="fsdp")})
    assert seconds(plan, TOGETHER, make_profile(1.0, 1.0)) < seconds(plan, sharded, make_profile(1.0, 1.0))


def test_splits_that_cannot_be_dealt_the_steps_are_left_out():
    found = costs(replace(make_profile(1.0, 1.0), whole=False), ranks=4, impossible=(1, 3))
    assert [each.name for each in found.predictions()] == ["separate 2 + 2"]
    with pytest.raises(NoPlanError, match="cannot be dealt to 4 ranks in any way"):
        costs(replace(make_profile(1.0, 1.0), whole=False), ranks=4, impossible=(1, 2, 3)).predictions()


def split_taking(seconds, ranks):
    """A prediction for every number of encoder ranks: what ``seconds`` says, or None."""
    tried = []

    def predict(encoders):
        tried.append(encoders)
        allocation, taken = default_allocation(ranks, "separate", encoders), seconds(encoders)
        if taken is None:
            return None
        return MeasuredPrediction("separate", short_name(allocation), taken, 1.0, {}, allocation)

    return predict, tried


@pytest.mark.parametrize("best", [1, 2, 137, 200, 512, 1022, 1023])
def test_of_a_thousand_ranks_the_best_split_is_found_by_trying_a_few(best):
    predict, tried = split_taking(lambda encoders: 100.0 + abs(encoders - best), 1024)
    found = search_splits(1023, predict)
    assert min(found, key=lambda each: each.seconds).name == f"separate {best} + {1024 - best}"
    assert len(tried) < 80


def test_the_few_possible_splits_of_many_ranks_are_all_found():
    predict, _ = split_taking({131: 3.0, 192: 2.0, 254: 4.0}.get, 256)
    assert [each.name for each in search_splits(255, predict)] == [
        "separate 131 + 125",
        "separate 192 + 64",
        "separate 254 + 2",
    ]
