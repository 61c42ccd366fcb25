"""The quickstart's drawings, records and tokenizer are what their SOURCE says."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flowtrain_lightning.data import ChatTemplate, JsonFile, Record, Tokenizer, open_tokenizer
from flowtrain_lightning.data.sources.record_store import locations_of
from recipes.quickstart.check import prompts, read_records, swapped, write_records
from recipes.quickstart.colours import main_colours
from recipes.quickstart.prepare_data import KEYWORDS, LONG_SIDE
from recipes.quickstart.selection import clean_keyword, is_chosen, is_telling

RECIPE = Path(__file__).parents[2] / "recipes" / "quickstart"
DATA = RECIPE / "data"
SIX_MEGABYTES = 6_000_000


@pytest.fixture(scope="module")
def records() -> dict[str, list[Record]]:
    stores = {name: JsonFile(DATA / f"{name}.jsonl") for name in ("train", "val")}
    return {name: store.records(0, locations_of(store)) for name, store in stores.items()}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return open_tokenizer(RECIPE / "tokenizer.json")


def test_the_shipped_data_weigh_less_than_six_megabytes() -> None:
    assert sum(path.stat().st_size for path in DATA.rglob("*") if path.is_file()) < SIX_MEGABYTES


def test_every_picture_is_a_small_palette_png_of_the_size_that_its_record_says(
    records: dict[str, list[Record]],
) -> None:
    named = {image["path"]: image for each in records.values() for record in each for image in record.fields["images"]}
    assert {f"images/{path.name}" for path in (DATA / "images").iterdir()} == set(named)
    for path, image in named.items():
        with Image.open(DATA / path) as picture:
            assert (picture.format, picture.mode) == ("PNG", "P")
            assert picture.size == (image["w"], image["h"])
            assert max(picture.size) == LONG_SIDE


def test_drawings_keep_their_own_aspect_ratios(records: dict[str, list[Record]]) -> None:
    ratios = {round(i["w"] / i["h"], 2) for record in records["train"] for i in record.fields["images"]}
    assert len(ratios) > 50
    assert min(ratios) < 0.5 < 2 < max(ratios)


def test_no_drawing_is_in_both_training_and_validation(records: dict[str, list[Record]]) -> None:
    pictures = {name: {path for record in each for path in record.images} for name, each in records.items()}
    assert not pictures["train"] & pictures["val"]


@pytest.mark.parametrize("name", ["train", "val"])
def test_there_are_records_with_one_two_and_no_pictures(records: dict[str, list[Record]], name: str) -> None:
    share = np.bincount([len(record.images) for record in records[name]]) / len(records[name])
    assert len(share) == 3
    assert share[0] > 0.05
    assert share[1] > 0.7
    assert share[2] > 0.05


def test_every_record_names_its_author_and_answers_its_questions(records: dict[str, list[Record]]) -> None:
    for record in records["train"] + records["val"]:
        assert record.fields["author"]
        assert [turn.role for turn in record.turns[::2]] == ["user"] * (len(record.turns) // 2)
        for turn in record.turns[1::2]:
            assert turn.role == "assistant"
            assert all(part.strip() for part in turn.text.replace(";", ",").split(","))
        assert 1 <= len(record.turns[1].text.split(";")[0].split(",")) <= KEYWORDS


def test_the_tokenizer_gives_back_all_text(records: dict[str, list[Record]], tokenizer: Tokenizer) -> None:
    for record in records["train"] + records["val"]:
        for turn in record.turns:
            assert tokenizer.decode(tokenizer.encode(turn.text)) == turn.text
    unseen = "Ein Füchschen, 狐 & 🦊\n"
    assert tokenizer.decode(tokenizer.encode(unseen)) == unseen


def test_every_mark_of_the_chat_template_is_one_token(tokenizer: Tokenizer) -> None:
    template = ChatTemplate()
    for mark in ("<|im_start|>", template.end, template.image_token, template.before_image, template.after_image):
        assert tokenizer.encode(mark) == [tokenizer.token_to_id(mark)]


def test_frequent_keywords_are_one_or_two_tokens(tokenizer: Tokenizer) -> None:
    assert max(len(tokenizer.encode(word)) for word in ("flag", "food", "computer", "animal", "europe", "card")) <= 2


@pytest.mark.parametrize(
    ("colours", "expected"),
    [
        ([(250, 10, 10)] * 9 + [(255, 255, 255)], ("red",)),
        ([(250, 10, 10)] * 4 + [(255, 255, 255)] * 6, ("white", "red")),
        ([(20, 20, 20), (128, 128, 128), (10, 10, 220), (10, 200, 10)], ("black", "blue", "green")),
        ([(120, 60, 10)], ("brown",)),
        ([(255, 150, 20)], ("orange",)),
        ([(200, 20, 220)], ("purple",)),
        ([(255, 240, 20)], ("yellow",)),
        ([], ("white",)),
    ],
)
def test_main_colours_are_named_the_largest_first(colours: list[tuple[int, ...]], expected: tuple[str, ...]) -> None:
    assert main_colours(np.array(colours, dtype=np.uint8).reshape(-1, 3)) == expected


def test_keywords_have_one_spelling_or_are_left_out() -> None:
    assert clean_keyword(" Road_Sign ") == clean_keyword("roadsign") == "road sign"
    assert clean_keyword("hash") is None
    assert clean_keyword("HASH(0x897d6dc)") is None


def test_the_chosen_drawings_come_from_chosen_folders() -> None:
    assert is_chosen("animals/birds/heron")
    assert not is_chosen("logos/heron")
    assert not is_chosen("tools/weapons/heron")
    assert is_telling("Heron at Night")
    assert not is_telling("Clipart by Nicu Buculei - head1")


def test_swapped_records_keep_their_words_and_lose_their_pictures() -> None:
    own = read_records(DATA / "val.jsonl")
    other = swapped(own)
    for before, after in zip(own, other, strict=True):
        assert before["messages"] == after["messages"]
        assert len(before["images"]) == len(after["images"])
        assert not _paths(before) & _paths(after)


def test_prompts_are_single_drawings_with_one_question_and_absolute_paths(tmp_path: Path) -> None:
    write_records(tmp_path / "prompts.jsonl", prompts(read_records(DATA / "val.jsonl", 40)))
    written = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert 20 < len(written) < 40
    for record in written:
        assert len(record["images"]) == 1
        assert Path(record["images"][0]["path"]).is_absolute()
        assert [message["role"] for message in record["messages"]] == ["user", "assistant"]


def _paths(record: dict[str, Any]) -> set[str]:
    return {image["path"] for image in record["images"]}
