"""A loader goes on from a saved position with exactly the batches that were left, or says why it cannot."""

import json
from dataclasses import replace

import pytest

from flowtrain_lightning.data import RankShard, TokenSteps
from flowtrain_lightning.packing import CostModel
from tests.data.support import TOKEN_STEPS, read


@pytest.mark.parametrize(("workers", "delivered"), [(0, 0), (0, 2), (0, 5), (2, 2)])
def test_a_saved_position_gives_exactly_the_remaining_batches(loader_of, workers, delivered):
    first = loader_of(num_workers=workers)
    whole = read(loader_of(), epoch=1)
    assert read(first, epoch=1, count=delivered) == whole[:delivered]
    second = loader_of(num_workers=workers)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert read(second, epoch=1 if delivered else 0) == (whole[delivered:] if delivered else read(loader_of()))
    assert second.state_dict()["step"] == 5


def test_a_position_in_another_epoch_begins_the_epoch_afresh(loader_of):
    first, second = loader_of(), loader_of()
    read(first, epoch=0)
    second.load_state_dict(first.state_dict())
    assert read(second, epoch=1) == read(loader_of(), epoch=1)


def test_a_position_is_used_once(loader_of):
    loader = loader_of()
    loader.load_state_dict({**loader.state_dict(), "step": 3})
    assert len(read(loader)) == 2
    assert len(read(loader)) == 5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"seed": 4}, "seed was 3, is 4"),
        ({"global_batch_size": 5}, "global_batch_size was 4, is 5"),
        ({"shuffle": False}, "shuffle was True, is False"),
        ({"token_budget": 28, "too_long": "drop"}, "files was"),
    ],
)
def test_a_position_among_other_samples_is_refused(loader_of, change, words):
    state = loader_of().state_dict()
    with pytest.raises(ValueError, match=words):
        loader_of(**change).load_state_dict(state)


def test_settings_that_move_no_sample_to_another_step_may_change(loader_of):
    state = {**loader_of().state_dict(), "step": 2}
    loader = loader_of(token_budget=100, pad_to_budget=True, num_workers=1)
    loader.load_state_dict(state)
    assert read(loader) == read(loader_of())[2:]


@pytest.mark.parametrize(("workers", "delivered"), [(0, 0), (0, 3), (2, 1)])
def test_a_saved_position_in_a_token_stream_gives_exactly_the_remaining_batches(loader_of, workers, delivered):
    first = loader_of(num_workers=workers, token_steps=TOKEN_STEPS)
    whole = [read(loader_of(token_steps=TOKEN_STEPS), epoch) for epoch in (0, 1, 2)]
    read(first, epoch=0)
    assert read(first, epoch=1, count=delivered) == whole[1][:delivered]
    state = json.loads(json.dumps(first.state_dict()))
    second = loader_of(num_workers=workers, token_steps=TOKEN_STEPS)
    second.load_state_dict(state)
    assert second.state_dict() == state
    if delivered:
        assert read(second, epoch=1) == whole[1][delivered:]
    assert read(second, epoch=2) == whole[2]


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_position_in_a_token_stream_does_not_depend_on_this_runs_ranks(loader_of, ranks):
    whole = read(loader_of(token_steps=TOKEN_STEPS))
    first = loader_of(token_steps=TOKEN_STEPS)
    read(first, count=1)
    state = first.state_dict()
    second = loader_of(token_steps=TOKEN_STEPS, shard=RankShard.plain(0, ranks))
    second.load_state_dict(state)
    assert second.state_dict() == state
    assert read(second) == whole[1:]


def test_a_balance_group_that_is_not_set_is_that_of_the_checkpoint(loader_of):
    other = replace(TOKEN_STEPS, balance_group=1)
    first, second = loader_of(token_steps=other), loader_of(token_steps=TOKEN_STEPS)
    assert second.state_dict()["settings"]["balance_group"] == 2
    read(first, count=1)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert read(second) == read(loader_of(token_steps=other))[1:]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"token_budget": 66}, "token_budget was 64, is 66"),
        ({"token_steps": TokenSteps(4, max_delay=2)}, "microbatches was 2, is 4"),
        ({"token_steps": TokenSteps(2, max_delay=3)}, "max_delay was 2, is 3"),
        ({"token_steps": TokenSteps(2, balance_group=1, max_delay=2)}, "balance_group was 2, is 1"),
        ({"cost": CostModel(1.0, 2.0, 0.0)}, "cost was .*, is .*2.0"),
        ({"token_steps": None}, "now: batch_unit was tokens, is samples. Use"),
    ],
)
def test_a_position_in_another_token_stream_is_refused(loader_of, change, words):
    state = loader_of(token_steps=TOKEN_STEPS).state_dict()
    with pytest.raises(ValueError, match=words):
        loader_of(**({"token_steps": TOKEN_STEPS} | change)).load_state_dict(state)
