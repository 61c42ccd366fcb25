"""Cost models that change under way hold from the step that was named, also after a resume."""

import json

import pytest

from flowtrain_lightning.data import RankShard
from flowtrain_lightning.data.steps.step_packing import CostChange
from flowtrain_lightning.packing import CostModel
from tests.data.support import WORKERS, named, read

ATTENTION = CostModel(0.0, 1.0, 0.0)


def packed(batches):
    return [[[m.tolist() for m in of_rank] for of_rank in batch.plan.microbatches] for batch in batches]


@pytest.fixture
def uneven(loader_of):
    """Builds loaders of steps whose packing on two ranks depends on the cost model."""
    return lambda **changes: loader_of(global_batch_size=10, shard=RankShard.plain(0, 2), **changes)


@WORKERS
def test_costs_change_in_the_step_that_was_named_and_not_before(uneven, workers):
    plain = packed(uneven(cost=CostModel(1.0, 0.0, 0.0)))
    attentive = packed(uneven(cost=ATTENTION))
    assert all(one != other for one, other in zip(plain, attentive, strict=True))
    loader = uneven(cost=CostModel(1.0, 0.0, 0.0), num_workers=workers)
    loader.change_costs(CostChange(0, 1, ATTENTION))
    assert packed(loader) == [plain[0], attentive[1]]
    assert named(loader) == named(uneven())
    later = uneven(num_workers=workers)
    later.load_state_dict(loader.state_dict())
    loader.sampler.set_epoch(1)
    later.sampler.set_epoch(1)
    assert packed(loader) == packed(later)


@WORKERS
def test_a_change_that_comes_too_late_is_refused(loader_of, workers):
    loader = loader_of(num_workers=workers)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(ValueError, match="step 0 of epoch 0, but what holds in step"):
        loader.change_costs(CostChange(0, 0, ATTENTION))
    loader.change_costs(CostChange(0, 2 + loader.planned_ahead, ATTENTION))
    with pytest.raises(ValueError, match="name a later step"):
        loader.change_costs(CostChange(0, 1 + loader.planned_ahead, ATTENTION))


def test_a_state_keeps_the_changes_that_still_matter(loader_of):
    loader = loader_of()
    costs = [CostModel(float(number), 1.0, 0.0) for number in range(4)]
    read(loader)
    for number, position in enumerate([(1, 0), (1, 1), (1, 3)]):
        loader.change_costs(CostChange(*position, costs[number]))
    read(loader, epoch=1)
    loader.change_costs(CostChange(2, 2, costs[3], {"encoder": costs[0]}))
    state = json.loads(json.dumps(loader.state_dict()))
    assert [(change["epoch"], change["step"]) for change in state["changes"]] == [(1, 3), (2, 2)]
    second = loader_of()
    second.load_state_dict(state)
    assert second.state_dict() == state
    given = loader_of(cost=ATTENTION)
    given.load_state_dict(state)
    assert given.state_dict()["changes"] == []
