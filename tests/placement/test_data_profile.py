"""How many samples it takes to know a data set, and what is kept of them."""

import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from flowtrain_lightning.allocator import ROLES, Allocation, Layout, named_model
from flowtrain_lightning.allocator.workload import role_loads
from flowtrain_lightning.data import DataError, TokenSteps
from flowtrain_lightning.packing import CostModel, SampleSizes
from flowtrain_lightning.placement.data_profile import encoder_devices, profile_data, sample_costs, stable_count
from flowtrain_lightning.placement.drawn_steps import steps_of
from tests.data.sources.test_resuming import Lines
from tests.placement.test_profile import ENCODER, PROFILE
from tests.tiny import tiny_data, write_records


@pytest.fixture
def draw():
    return np.random.default_rng(0)


def test_an_even_load_needs_the_fewest_samples(draw):
    assert stable_count(10_000, lambda drawn: "the same", draw) == (256, True)


def test_the_more_samples_differ_the_more_of_them_make_a_choice_stable(draw):
    values = np.random.default_rng(1).normal(10, 1, 100_000)
    wild = np.random.default_rng(1).normal(10, 40, 100_000)
    few, stable = stable_count(100_000, lambda drawn: round(values[drawn].mean() / 3), draw)
    many, also_stable = stable_count(100_000, lambda drawn: round(wild[drawn].mean() / 3), draw)
    assert stable
    assert also_stable
    assert few < many < 50_000


def test_where_all_samples_are_too_few_to_tell_all_are_taken(draw):
    assert stable_count(400, lambda drawn: "the same", draw) == (400, False)
    assert stable_count(1000, lambda drawn: int(drawn[0]), draw) == (1000, False)


@pytest.mark.parametrize(
    ("encoder", "backbone", "devices", "expected"),
    [(1, 1, 2, 1), (1, 3, 8, 2), (3, 1, 8, 6), (1, 100, 8, 1), (100, 1, 8, 7), (0, 1, 8, 0), (1, 1, 1, 0)],
)
def test_devices_are_split_so_that_the_slower_half_is_as_fast_as_can_be(encoder, backbone, devices, expected):
    assert encoder_devices(encoder, backbone, devices) == expected


def test_a_sample_costs_its_tokens_its_media_items_and_its_part_of_a_microbatch():
    sizes = SampleSizes(*(np.array(values) for values in ([10, 20], [1, 1], [0, 0, 2], [1, 1], [4, 8])))
    encoder, backbone = sample_costs(sizes, PROFILE, token_budget=40)
    assert encoder.tolist() == [0.0, 4 + 8]  # a second a patch
    assert backbone.tolist() == [20 + 50 + 0.25, 40 + 200 + 0.5]  # 2 s a token, 0.5 s a pair, 1 s a microbatch


def test_a_data_profile_is_a_workload_of_drawn_samples(tmp_path):
    write_records(tmp_path, 80)
    data = tiny_data(tmp_path)
    found = profile_data(data, PROFILE, devices=4)
    assert found.available == 80
    assert len(found.sizes) == 80
    assert found.workload.token_budget == 160
    assert found.workload.global_batch_size == 8
    assert found.workload.tokens.tolist() == found.sizes.tokens.tolist()
    assert found.workload.media["image"].tolist() == found.sizes.media_patches.tolist()
    assert 0 < found.encoder_share < 1


def test_a_step_of_microbatches_is_as_many_samples_as_fill_them_on_average(tmp_path):
    write_records(tmp_path, 80)
    data = tiny_data(tmp_path, global_batch_size=None, token_steps=TokenSteps(4))
    workload = profile_data(data, PROFILE).workload
    assert workload.global_batch_size == round(0.986 * 4 * 160 / workload.tokens.mean())


def test_a_stream_gives_no_samples_to_draw(tmp_path):
    write_records(tmp_path, 8)
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    with pytest.raises(DataError, match=r"are a stream, .* Set FlowTrainStrategy\(profile='off'\), or name the ranks"):
        profile_data(tiny_data(tmp_path, train=Lines(rows)), PROFILE)


def test_the_same_samples_are_drawn_for_the_same_seed(tmp_path):
    write_records(tmp_path, 80)  # drawn are all, in an order that the seed decides
    first, again, other = (
        profile_data(tiny_data(tmp_path, seed=seed), PROFILE).sizes.tokens.tolist() for seed in (1, 1, 2)
    )
    assert first == again != other


def test_without_media_the_encoder_gets_no_device(tmp_path):
    write_records(tmp_path, 40, images=False)
    free = replace(ENCODER, cost=CostModel(0.0, 0.0, 0.0), measured=())
    found = profile_data(tiny_data(tmp_path), replace(PROFILE, roles={**PROFILE.roles, "encoder": free}))
    assert found.encoder_devices == 0
    assert found.encoder_share == 0


def ask_about_pictures(folder, pictures, questions):
    """Records about pictures of noise, each asked about a number of times, and data that bring these together."""
    draw, told = np.random.default_rng(0), []
    for number in range(pictures):
        path = folder / f"{number}.png"
        Image.fromarray(draw.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(path)
        asked = {"role": "user", "content": "<image>what?"}, {"role": "assistant", "content": "a word"}
        told += [json.dumps({"images": [{"path": path.name}], "messages": asked})] * questions
    (folder / "train.jsonl").write_text("\n".join(told))
    return tiny_data(folder, global_batch_size=10, group_by="media" if questions > 1 else None)


def test_a_picture_that_samples_of_a_step_share_is_planned_as_training_encodes_it(tmp_path):
    patches = {}
    for questions in (5, 1):
        folder = tmp_path / str(questions)
        folder.mkdir()
        data = ask_about_pictures(folder, 80 // questions, questions)
        found = profile_data(data, PROFILE, devices=4)
        loads = role_loads(named_model("qwen2.5-vl-3b"), found.workload)
        steps = data.train_dataloader().steps
        plans = [steps.plan(0, step) for step in range(len(steps))]
        trained = [plan.sizes.media_patches[plan.encoded].sum() for plan in plans]
        assert loads["encoder"].tokens == pytest.approx(np.mean(trained), rel=0.05)
        drawn = steps_of(found.workload, found.sizes, count=8)
        allocation = Allocation("colocated", dict.fromkeys(ROLES, Layout(2)), dict.fromkeys(ROLES, (0, 1)))
        simulated = [plan.sizes.media_patches[plan.encoded].sum() for plan in drawn.packed(allocation)]
        assert np.mean(simulated) == pytest.approx(np.mean(trained), rel=0.05)
        patches[questions] = loads["encoder"].tokens, found.encoder_share
    assert patches[5][0] == pytest.approx(patches[1][0] / 5)
    assert patches[5][1] < patches[1][1]
