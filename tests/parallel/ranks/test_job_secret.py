"""Only what was said with a job's secret is believed, and nobody but its user knows the secret."""

import os
import stat

import pytest

from flowtrain_lightning.parallel.ranks.job_secret import (
    SECRET,
    ForeignMessageError,
    JobKey,
    job_key,
    offer_secret,
    secret_file,
)

CONTENT, CONTEXT = b"the address of rank 1", "rank 1"


@pytest.fixture
def home(tmp_path, monkeypatch):
    """A home folder without a secret, and no secret in the environment."""
    monkeypatch.delenv(SECRET)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def same(one, other):
    return one.open(other.seal(CONTENT, CONTEXT), CONTEXT) == CONTENT


def test_what_was_sealed_is_opened_in_its_context_only():
    key = JobKey(b"secret")
    assert key.open(key.seal(CONTENT, CONTEXT), CONTEXT) == CONTENT
    with pytest.raises(ForeignMessageError, match="What came for rank 2 was not said with this job's secret"):
        key.open(key.seal(CONTENT, CONTEXT), "rank 2")


@pytest.mark.parametrize("other", [JobKey(b"guessed"), JobKey(b"secret").derive("another purpose")])
def test_no_other_key_opens_it(other):
    with pytest.raises(ForeignMessageError):
        other.open(JobKey(b"secret").seal(CONTENT, CONTEXT), CONTEXT)


def test_no_bit_of_it_can_be_changed_and_none_left_out():
    key = JobKey(b"secret")
    sealed = key.seal(CONTENT, CONTEXT)
    for bit in range(8 * len(sealed)):
        damaged = bytearray(sealed)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ForeignMessageError):
            key.open(bytes(damaged), CONTEXT)
    for length in range(len(sealed)):
        with pytest.raises(ForeignMessageError):
            key.open(sealed[:length], CONTEXT)


def test_all_processes_of_a_user_find_the_secret_that_the_first_one_made(home):
    assert same(job_key(2), job_key(2))
    assert stat.S_IMODE(secret_file().stat().st_mode) == 0o600
    assert [path.name for path in secret_file().parent.iterdir()] == ["job-secret"]


def test_each_run_has_a_key_of_its_own(home, monkeypatch):
    first = job_key(2)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "another")
    with pytest.raises(ForeignMessageError):
        same(job_key(2), first)


def test_a_secret_of_the_environment_comes_first_and_no_file_is_made(home, monkeypatch):
    monkeypatch.setenv(SECRET, "one that all nodes are given, of 32 characters")
    job_key(2)
    assert not secret_file().exists()


def test_a_single_rank_needs_no_secret(home):
    job_key(1)
    assert not secret_file().exists()


def test_the_launcher_hands_a_fresh_secret_to_its_ranks_unless_it_was_given_one(home):
    offer_secret()
    first = os.environ[SECRET]
    offer_secret()
    assert os.environ[SECRET] == first
    assert len(first) == 64


def test_a_secret_that_others_could_have_read_is_refused(home):
    job_key(2)
    secret_file().chmod(0o640)
    with pytest.raises(RuntimeError, match=r"mode 640; expected this user's own file of mode 600"):
        job_key(2)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_secret_that_belongs_to_another_user_is_refused(home):
    job_key(2)
    os.chown(secret_file(), 65534, 65534)
    with pytest.raises(RuntimeError, match="belongs to user 65534"):
        job_key(2)


def test_a_secret_that_can_be_guessed_is_refused(home, monkeypatch):
    monkeypatch.setenv(SECRET, "12345")
    with pytest.raises(RuntimeError, match=f"{SECRET} holds a secret of 5 characters; expected 32 or more"):
        job_key(2)


def test_without_a_home_folder_the_sentence_says_what_to_set(home, monkeypatch):
    (home / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "file"))
    with pytest.raises(RuntimeError, match=f"none can be kept in the home folder .* Set {SECRET} to the same value"):
        job_key(2)
