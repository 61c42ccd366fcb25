"""Every kind of tokenizer that people have is adapted, and told from others."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from flowtrain_lightning.data import open_tokenizer
from tests.data.support import Letters


@pytest.fixture(scope="module")
def trained():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<end>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["some text to learn from"], trainer)
    return tokenizer


def test_a_file_says_beside_a_tokenizer_how_an_answer_ends(trained, tmp_path):
    trained.save(str(tmp_path / "tokenizer.json"))
    plain = open_tokenizer(tmp_path)
    assert plain.end is None
    for said in ('"<end>"', '{"content": "<end>", "lstrip": false}'):
        (tmp_path / "tokenizer_config.json").write_text(f'{{"eos_token": {said}}}')
        for path in (tmp_path, tmp_path / "tokenizer.json"):
            told = open_tokenizer(path)
            assert told.end == "<end>"
            assert told.fingerprint != plain.fingerprint


class LikeHuggingFace:
    """The methods of a Hugging Face tokenizer that are used."""

    unk_token, unk_token_id = "<unk>", 0

    def __init__(self, vocabulary):
        self.vocabulary = vocabulary

    def get_vocab(self):
        return self.vocabulary

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return [self.vocabulary.get(word, 0) for word in text.split()]

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        return " ".join(word for word, number in self.vocabulary.items() if number in ids)

    def convert_tokens_to_ids(self, token):
        return self.vocabulary.get(token, self.unk_token_id)


def test_a_file_its_folder_and_the_object_are_the_same_tokenizer(trained, tmp_path):
    trained.save(str(tmp_path / "tokenizer.json"))
    opened = [open_tokenizer(given) for given in (tmp_path, str(tmp_path / "tokenizer.json"), trained)]
    assert len({tokenizer.fingerprint for tokenizer in opened}) == 1
    for tokenizer in opened:
        ids = tokenizer.encode("some text<end>")
        assert ids[-1] == tokenizer.token_to_id("<end>")
        assert tokenizer.decode(ids) == "some text"
        assert tokenizer.token_to_id("nowhere") is None


def test_truncation_and_padding_kept_in_a_file_are_switched_off(trained):
    cutting = Tokenizer.from_str(trained.to_str())
    cutting.enable_truncation(2)
    cutting.enable_padding(length=9)
    assert open_tokenizer(cutting).encode("some text") == open_tokenizer(trained).encode("some text")
    assert cutting.truncation is not None


def test_another_vocabulary_has_another_fingerprint(trained):
    other = Tokenizer.from_str(trained.to_str())
    other.add_special_tokens(["<more>"])
    assert open_tokenizer(other).fingerprint != open_tokenizer(trained).fingerprint


def test_a_hugging_face_tokenizer_is_adapted():
    tokenizer = open_tokenizer(LikeHuggingFace({"<unk>": 0, "a": 1, "b": 2}))
    assert tokenizer.encode("b a c") == [2, 1, 0]
    assert tokenizer.decode([1]) == "a"
    assert [tokenizer.token_to_id(token) for token in ("a", "c", "<unk>")] == [1, None, 0]
    assert tokenizer.fingerprint != open_tokenizer(LikeHuggingFace({"<unk>": 0, "a": 2, "b": 1})).fingerprint


def test_an_own_tokenizer_is_taken_as_it_is():
    own = Letters()
    assert open_tokenizer(own) is own


def test_what_is_no_tokenizer_is_refused(tmp_path):
    with pytest.raises(TypeError, match="tokenizer is a int"):
        open_tokenizer(3)
    with pytest.raises(FileNotFoundError, match=r"there is no file .*tokenizer\.json"):
        open_tokenizer(tmp_path)
