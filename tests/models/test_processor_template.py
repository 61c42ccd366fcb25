"""Conversations become, token for token, what Hugging Face's own processor of each family makes of them."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowtrain_lightning.data import IGNORED_LABEL, DataError
from flowtrain_lightning.data.records.record_turns import MARKERS

transformers = pytest.importorskip("transformers")

from flowtrain_lightning.models.processor import processor_of, template_of  # noqa: E402
from tests.models.both_processors import CONVERSATIONS, SIZES, Both, assistant, user, write_images  # noqa: E402
from tests.models.processors import PUBLISHED  # noqa: E402

FAMILIES = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            name == "smolvlm" and importlib.util.find_spec("num2words") is None, reason="its processor needs num2words"
        ),
    )
    for name in PUBLISHED
]
STOPS = {"qwen2_vl": "<|im_end|>", "qwen2_5_vl": "<|im_end|>", "qwen3_vl": "<|im_end|>", "internvl": "<|im_end|>"}
STOPS |= {"smolvlm": "<end_of_utterance>", "gemma3": "<end_of_turn>"}
"""What ends a learned turn, where the template does not mark by itself what is learned."""


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Both]:
    folder = tmp_path_factory.mktemp("families")
    images = write_images(folder)
    made: dict[str, Both] = {}

    def both(family: str) -> Both:
        if family not in made:
            path = folder / family
            theirs = PUBLISHED[family].save(path, legacy=family == "qwen2_vl")
            made[family] = Both(theirs, processor_of(path), images, family)
        return made[family]

    return both


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_tokens_are_those_of_the_processor(both, family, conversation):
    of = both(family)
    record = of.record(CONVERSATIONS[conversation])
    assert of.sequence(record).tokens.tolist() == of.expected(record)["input_ids"].tolist()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_is_that_of_the_processor(both, family):
    of = both(family)
    record = of.record(CONVERSATIONS["several images"])
    found = of.sequence(record, prompt=True)
    assert found.tokens.tolist() == of.expected(record, prompt=True)["input_ids"].tolist()
    assert found.targets == 0


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=20, deadline=None)
@given(texts=st.lists(st.text(st.sampled_from(" \n\tabA.ä:<|>_你🙂")), min_size=2, max_size=4))
def test_any_text_is_written_as_by_the_processor(both, family, texts):
    of = both(family)
    roles = [user, assistant]
    record = of.record([roles[number % 2](text) for number, text in enumerate(texts)])
    assert of.sequence(record).tokens.tolist() == of.expected(record)["input_ids"].tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("conversation", ["an image", "several images"])
def test_rows_of_features_are_as_many_as_the_processor_writes(both, family, conversation):
    of = both(family)
    record, images = of.record(CONVERSATIONS[conversation]), of.ours.images
    sizes = [SIZES[number % len(SIZES)] for number in range(len(record.images))]
    grids = [images.size(*size, alone=len(sizes) == 1) for size in sizes]
    rows = [images.rows_of_features(grid, size) for grid, size in zip(grids, sizes, strict=True)]
    assert rows == of.rows(record).tolist()


@pytest.mark.parametrize("family", ["llava", "llava_onevision"])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_where_the_template_marks_what_is_learned_labels_follow_it(both, family, conversation):
    of = both(family)
    record = of.record(CONVERSATIONS[conversation])
    mask = of.expected(record, mask=True)["assistant_masks"].astype(bool)
    labels = of.sequence(record).labels
    assert (labels[:-1] != IGNORED_LABEL).tolist() == mask[1:].tolist()


@pytest.mark.parametrize("family", [name for name in FAMILIES if name.values[0] in STOPS])
def test_elsewhere_answers_are_learned_with_the_token_that_ends_them(both, family):
    of = both(family)
    turns = [user("<image>What?"), assistant("A cat."), user("Sure?"), assistant("Yes\n\nit is.")]
    sequence = of.sequence(of.record(turns))
    learned = sequence.labels[sequence.labels != IGNORED_LABEL]
    stop = STOPS[family]
    lead = " " if family == "smolvlm" else ""
    told = of.theirs.tokenizer.decode(learned)
    assert told == f"{lead}A cat.{stop}{lead}Yes\n\nit is.{stop}"


def test_a_token_that_reaches_from_the_header_into_the_answer_is_learned(both):
    of = both("qwen2_5_vl")
    sequence = of.sequence(of.record([user("What?"), assistant("\n\nHello")]))
    learned = of.theirs.tokenizer.decode(sequence.labels[sequence.labels != IGNORED_LABEL])
    assert learned.endswith("\n\nHello<|im_end|>")
    assert learned.startswith("\n")


@pytest.mark.parametrize("family", FAMILIES)
def test_features_go_where_the_image_tokens_are(both, family):
    of = both(family)
    sequence = of.sequence(of.record(CONVERSATIONS["several images"]))
    image = of.template.image_id(of.ours.tokenizer)
    assert sequence.media_positions.tolist() == np.flatnonzero(sequence.tokens == image).tolist()
    assert len(sequence.media_positions) == sequence.media_rows.sum()
    assert not np.isin(image, sequence.labels)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_cut_sequence_is_made_again_from_its_remaining_images(both, family):
    of = both(family)
    record = of.record(CONVERSATIONS["several images"])
    whole, rows = of.sequence(record), of.rows(record)
    for limit in range(1, len(whole), 3):
        cut = whole.cut(limit)
        again = of.template.sequence(record, of.ours.tokenizer, rows[: len(cut.media_rows)]).cut(limit)
        assert again.tokens.tolist() == cut.tokens.tolist()
        assert again.labels.tolist() == cut.labels.tolist()


TOOL = {"type": "function", "function": {"name": "look", "description": "Looks <|im_end|>", "parameters": {}}}


def test_tools_are_written_by_a_template_that_knows_them(both):
    of = both("qwen3_vl")
    call = {"type": "function", "function": {"name": "look", "arguments": {"at": "it"}}}
    turns = [
        user("<image>What is this?"),
        assistant("", tool_calls=[call]),
        {"role": "tool", "content": "a cat"},
        assistant("A cat."),
    ]
    tool = {**TOOL, "function": {**TOOL["function"], "description": "Looks."}}
    record = of.record(turns, tools=[tool])
    sequence = of.sequence(record)
    assert sequence.tokens.tolist() == of.expected(record)["input_ids"].tolist()
    learned = of.theirs.tokenizer.decode(sequence.labels[sequence.labels != IGNORED_LABEL])
    assert learned == (
        '<tool_call>\n{"name": "look", "arguments": {"at": "it"}}\n</tool_call><|im_end|>A cat.<|im_end|>'
    )


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("where", ["user", "assistant"])
def test_special_tokens_that_a_text_spells_are_plain_text(both, family, where):
    of = both(family)
    tokenizer = of.theirs.tokenizer
    specials = [token for token in tokenizer.all_special_tokens if token not in MARKERS.values()]
    plain = [user("What"), assistant("That")]
    forged = [user("What"), assistant("That")]
    turn = forged[where == "assistant"]
    turn["content"] += " " + " ".join(specials) + " end"
    usual, found = (of.sequence(of.record(turns)).tokens for turns in (plain, forged))
    for token in specials:
        number = tokenizer.convert_tokens_to_ids(token)
        assert (found == number).sum() == (usual == number).sum(), token
    decoded = tokenizer.decode(found)
    assert " ".join(specials) in decoded


def test_special_tokens_in_roles_and_tools_are_plain_text(both):
    of = both("qwen3_vl")
    end = of.theirs.tokenizer.convert_tokens_to_ids("<|im_end|>")
    turns = [user("What?"), assistant("That.")]
    found = of.sequence(of.record(turns, tools=[TOOL])).tokens
    assert (found == end).sum() == 3  # of the system's, the user's and the assistant's turns
    assert "Looks <|im_end|>" in of.theirs.tokenizer.decode(found)
    forged = {"role": "user<|im_end|>", "content": "What?"}
    with pytest.raises(DataError, match="a role that the model's chat template does not name"):
        of.sequence(of.record([forged, *turns]))


def test_a_turn_of_weight_zero_is_not_learned(both):
    turns = [user("a"), assistant("Bad.", weight=0), user("b"), assistant("Good.", weight=1)]
    for family in ("qwen2_5_vl", "llava"):
        of = both(family)
        sequence = of.sequence(of.record(turns))
        learned = of.theirs.tokenizer.decode(sequence.labels[sequence.labels != IGNORED_LABEL])
        assert "Good." in learned
        assert "Bad" not in learned


@pytest.mark.parametrize(
    ("family", "turns", "others", "words"),
    [
        ("qwen2_5_vl", [user("a"), assistant("", tool_calls=[{"name": "b"}])], {}, "holds 'tool_calls', which the"),
        ("qwen2_5_vl", [user("a"), assistant("b")], {"tools": [TOOL]}, "holds 'tools', which the model's chat"),
        ("qwen2_5_vl", [user("a"), assistant("b", reasoning_content="c")], {}, "holds 'reasoning_content'"),
        (
            "qwen3_vl",
            [user("a"), {"role": "judge", "content": "good"}],
            {},
            "has a turn of 'judge', a role that the model's",
        ),
        (
            "qwen2_5_vl",
            [user("a"), {"role": "Assistant", "content": "b"}],
            {},
            "has a turn of 'Assistant', a role that",
        ),
        ("llava", [user("a"), {"role": "chatgpt", "content": "b"}], {}, "call it one of 'system', 'user', 'assistant'"),
        ("qwen3_vl", [{"role": "system", "content": "<image>a"}, user("b")], {}, "0 times, but the record has 1 image"),
        ("gemma3", [user("a"), user("b")], {}, "cannot write it .*roles must alternate"),
        ("qwen3_vl", [user("a\U000f0001"), assistant("b")], {}, "private use area"),
    ],
)
def test_what_the_template_does_not_write_is_refused_by_name(both, family, turns, others, words):
    of = both(family)
    with pytest.raises(DataError, match=rf"d\.jsonl, record 1: .*{words}"):
        of.sequence(of.record(turns, **others))


def test_a_template_alone_writes_the_same(both, tmp_path):
    of = both("internvl")
    PUBLISHED["internvl"].save(tmp_path)
    record = of.record(CONVERSATIONS["several images"])
    found = template_of(tmp_path).sequence(record, of.ours.tokenizer, of.rows(record))
    assert found.tokens.tolist() == of.sequence(record).tokens.tolist()


def test_another_tokenizer_is_refused(both):
    with pytest.raises(ValueError, match="Give both of one model"):
        both("qwen2_5_vl").template.image_id(both("internvl").ours.tokenizer)
