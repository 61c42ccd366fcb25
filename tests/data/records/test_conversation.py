"""Conversations become tokens, and labels on what the assistant says."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flowtrain_lightning.data import IGNORED_LABEL, ChatTemplate, DataError, Record, Turn
from tests.data.support import TEMPLATE, Letters

NO_ROWS = np.empty(0, np.int64)


def record(*turns):
    count = sum(text.count("<image>") for _, text in turns)
    return Record("d.jsonl, record 1", "1", tuple(Turn(*turn) for turn in turns), (Path("p"),) * count, {})


def text_of(tokens):
    names = {1: "<B>", 2: "<S>", 3: "<U>", 4: "<A>", 5: "<E>", 6: "<I>"}
    return "".join(names.get(number, chr(number)) for number in tokens.tolist())


def learned(sequence):
    """The text that is learned, with a gap where nothing is."""
    return "".join("_" if label == IGNORED_LABEL else text_of(np.array([label])) for label in sequence.labels)


def sequence_of(*turns, rows=(), **options):
    return TEMPLATE.sequence(record(*turns), Letters(), np.array(rows, dtype=np.int64), **options)


def test_a_conversation_becomes_tokens_and_shifted_labels():
    found = sequence_of(("system", "s"), ("user", "ab"), ("assistant", "cd"))
    assert text_of(found.tokens) == "<B><S>s<E><U>ab<E><A>cd<E>"
    assert learned(found) == "________cd<E>_"
    assert found.targets == 3


def test_every_assistant_turn_is_learned_and_nothing_else():
    found = sequence_of(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))
    assert text_of(found.tokens) == "<B><U>a<E><A>b<E><U>c<E><A>d<E>"
    assert learned(found) == "____b<E>____d<E>_"


def test_media_items_take_as_many_tokens_as_they_have_rows_of_features():
    found = sequence_of(("user", "a<image>b<image>"), ("assistant", "c"), rows=(2, 3))
    assert text_of(found.tokens) == "<B><U>a[<I><I>]b[<I><I><I>]<E><A>c<E>"
    assert found.media_start.tolist() == [4, 9]
    assert found.media_positions.tolist() == [4, 5, 9, 10, 11]
    assert learned(found) == "_" * 14 + "c<E>_"


def test_an_image_that_the_assistant_shows_is_not_learned_but_its_words_are():
    found = sequence_of(("assistant", "a<image>b"), rows=(1,))
    assert text_of(found.tokens) == "<B><A>a[<I>]b<E>"
    assert learned(found) == "_a___b<E>_"


def test_the_image_token_written_in_a_text_stands_for_no_feature():
    found = sequence_of(("user", "<I><image>"), rows=(1,))
    assert text_of(found.tokens) == "<B><U><I>[<I>]<E>"
    assert found.media_positions.tolist() == [6]
    assert (found.tokens == 6).sum() == 1


def test_a_prompt_that_a_user_ends_keeps_all_turns():
    asked = ("user", "a"), ("assistant", "b"), ("user", "c")
    whole, prompt = sequence_of(*asked), sequence_of(*asked, prompt=True)
    assert prompt.tokens.tolist()[:-1] == whole.tokens.tolist()
    assert prompt.tokens.tolist() == sequence_of(*asked, ("assistant", "d"), prompt=True).tokens.tolist()


def test_a_prompt_ends_with_the_header_of_the_last_assistant_turn():
    turns = (("user", "a<image>"), ("assistant", "b"), ("user", "c"), ("assistant", "d<image>"))
    found = sequence_of(*turns, rows=(1, 1), prompt=True)
    assert text_of(found.tokens) == "<B><U>a[<I>]<E><A>b<E><U>c<E><A>"
    assert found.media_rows.tolist() == [1]
    assert sequence_of(("user", "a"), prompt=True).tokens.tolist()[-1] == 4


def test_neighbouring_texts_are_encoded_together_as_they_will_be_read():
    texts = []

    class Recording(Letters):
        def encode(self, text):
            texts.append(text)
            return super().encode(text)

    turns = (("user", "a<image>b"), ("assistant", "c"), ("user", "d"))
    TEMPLATE.sequence(record(*turns), Recording(), np.array([1]))
    assert texts == ["<B><U>a[", "]b<E><A>", "c<E>", "<U>d<E>"]


def test_a_cut_takes_text_at_the_end_and_never_part_of_an_image():
    whole = sequence_of(("user", "a<image>b<image>"), ("assistant", "c"), rows=(2, 3))
    cuts = {limit: whole.cut(limit) for limit in (3, 4, 5, 6, 8, 11, 12, 14, 15, 16, 17)}
    assert {limit: len(cut) for limit, cut in cuts.items()} == {
        3: 3,
        4: 4,
        5: 4,
        6: 6,
        8: 8,
        11: 9,
        12: 12,
        14: 14,
        15: 15,
        16: 16,
        17: 17,
    }
    assert [len(cuts[limit].media_rows) for limit in (5, 6, 11, 12, 17)] == [0, 1, 1, 2, 2]
    assert all(cut.labels[-1] == IGNORED_LABEL for cut in cuts.values())
    assert cuts[16].targets == 1
    assert cuts[17] is whole


@pytest.mark.parametrize("limit", range(1, 18))
def test_a_cut_sequence_is_made_again_from_its_remaining_media_alone(limit):
    turns = (("user", "a<image>b<image>"), ("assistant", "c"))
    cut = sequence_of(*turns, rows=(2, 3)).cut(limit)
    again = sequence_of(*turns, rows=cut.media_rows.tolist()).cut(limit)
    assert again.tokens.tolist() == cut.tokens.tolist()
    assert again.labels.tolist() == cut.labels.tolist()


def test_the_default_template_is_qwens():
    class OfQwen(Letters):
        def token_to_id(self, token):
            return 6 if token == "<|image_pad|>" else None

    turns = (("user", "<image>\nWhat?"), ("assistant", "This."))
    found = ChatTemplate().sequence(record(*turns), OfQwen(), np.array([1]))
    assert text_of(found.tokens).replace("<I>", "<|image_pad|>") == (
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>\nWhat?<|im_end|>\n"
        "<|im_start|>assistant\nThis.<|im_end|>\n"
    )


def test_a_role_without_header_is_named():
    with pytest.raises(DataError, match=r"d\.jsonl, record 1: role 'tool' has no header.*system, user, assistant"):
        sequence_of(("tool", "x"))


def test_an_image_token_outside_the_vocabulary_is_named():
    template = replace(TEMPLATE, image_token="<unknown>")
    with pytest.raises(ValueError, match=r"no token '<unknown>'"):
        template.sequence(record(("user", "<image>")), Letters(), np.array([1]))
    template.sequence(record(("user", "text alone")), Letters(), NO_ROWS)
