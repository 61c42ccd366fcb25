"""What a step asks of the roles."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flowtrain_lightning.allocator import PlanningError, Workload, named_model, typical_workload
from flowtrain_lightning.allocator.workload import role_loads

MODULE = named_model("qwen2.5-vl-7b")


def test_a_steps_media_items_are_as_many_as_the_drawn_samples_have():
    workload = Workload(np.array([100, 200]), {"image": np.array([64, 64, 256])}, global_batch_size=10)
    loads = role_loads(MODULE, workload)
    assert (loads["encoder"].items, loads["backbone"].items) == (15, 10)
    assert loads["encoder"].tokens == pytest.approx(15 * 128)
    assert loads["backbone"].tokens == pytest.approx(10 * 150)


def test_media_items_that_are_the_same_are_counted_as_often_as_steps_encode_them():
    tokens, patches, content = np.full(20, 100), np.arange(1, 21) // 5 * 64 + 64, np.arange(20) // 5
    patches = np.repeat(patches[::5], 5)
    plain = Workload(tokens, {"image": patches}, global_batch_size=10)
    shared = replace(plain, content={"image": content}, together=True)
    each, once, by_chance = (
        role_loads(MODULE, one)["encoder"] for one in (plain, shared, replace(shared, together=False))
    )
    assert once.tokens == pytest.approx(each.tokens / 5)
    assert once.items == pytest.approx(2)  # of four pictures in two steps
    assert once.tokens < by_chance.tokens < each.tokens
    assert role_loads(MODULE, replace(shared, content={"image": np.full(20, -1)}))["encoder"].tokens == each.tokens


def test_a_batch_is_kept_for_later_microbatches_where_these_may_read_it_too():
    tokens, patches, content = np.full(20, 100), np.full(20, 64), {"image": np.arange(20) // 5}
    scattered = Workload(tokens, {"image": patches}, global_batch_size=10, content=content)
    assert role_loads(MODULE, scattered)["encoder"].batches_shared == 1
    assert role_loads(MODULE, replace(scattered, together=True))["encoder"].batches_shared == 0
    assert role_loads(MODULE, replace(scattered, content={}))["encoder"].batches_shared == 0


def test_an_encoder_batch_takes_the_longest_media_item_whatever_the_budget():
    workload = Workload(np.array([100]), {"image": np.array([5000])}, encoder_budget=1000)
    assert role_loads(MODULE, workload)["encoder"].budget == 5000


def test_a_step_that_fills_microbatches_has_the_samples_that_this_takes():
    load = role_loads(MODULE, typical_workload(MODULE).filling(32))["backbone"]
    assert load.forwards == 32
    assert load.tokens == pytest.approx(0.986 * 32 * 8192, rel=0.01)


@pytest.mark.parametrize(("length", "each"), [(5000, 1), (3000, 2), (4096, 1.97), (100, 80.77)])
def test_long_samples_leave_microbatches_unfilled_since_none_is_cut(length, each):
    workload = Workload(np.full(300, length), {"image": np.full(300, 64)}).filling(64)
    assert workload.global_batch_size == round(64 * each)


def test_typical_data_are_as_the_docstring_says():
    workload = typical_workload(MODULE)
    assert np.median(workload.tokens) == 1200
    assert np.median(workload.media["image"]) == 1024
    assert np.mean(workload.tokens > 2400) == pytest.approx(1 / 6, abs=0.01)
    assert abs(np.corrcoef(workload.tokens, workload.media["image"])[0, 1]) < 0.1


@pytest.mark.parametrize(
    ("tokens", "media", "settings", "words"),
    [
        ([], {"image": [1]}, {}, "must have samples"),
        ([0], {"image": [1]}, {}, "must have samples, each of at least one token"),
        ([9000], {"image": [1]}, {}, "longest sample has 9,000 tokens, but a microbatch takes 8,192; raise"),
        ([1], {"image": [1]}, {"global_batch_size": 0}, "global_batch_size is 0; it must be at least 1"),
        ([1], {"image": [1]}, {"microbatches": 0}, "microbatches is 0; it must be at least 1"),
        ([1], {"audio": [1]}, {}, "encodes image media, but the data give no lengths of such; they give: audio"),
        ([1], {"image": []}, {}, "must have image media of at least one token"),
    ],
)
def test_data_that_cannot_be_planned_for_are_refused(tokens, media, settings, words):
    arrays = {name: np.array(lengths, dtype=np.int64) for name, lengths in media.items()}

    def load():
        role_loads(MODULE, Workload(np.array(tokens, dtype=np.int64), arrays, **settings))

    with pytest.raises(PlanningError, match=words):
        load()
