"""Ranks that are killed or stopped at random moments: while they start, and while they exchange entries."""

import random
import signal
import time
from contextlib import ExitStack

import pytest

from tests.pool.faults import assert_nothing_is_left, exchange, exchange_until_killed, named, slowness, told
from tests.processes import Ranks, assert_all_good

RANKS, ROUNDS = 3, 300
AT_ONCE = 5
"""Jobs that run side by side."""

START_CALLS = 1800
"""About as often as a rank calls, or returns from, some function until its pool is open."""

START_SECONDS = 3.0
"""How long ranks wait for others to start."""


class Hit:
    """A job, one or two ranks of which are hit at a random moment while all exchange entries."""

    def __init__(self, seed, jobs, transport):
        choose = random.Random(seed)
        self.victims = choose.sample(range(RANKS), choose.choice([1, 1, 1, 2]))
        self.fault = choose.choice(["kill", "stop and kill", "stop and continue"])
        self.moments = [choose.random() * 0.1, choose.random() * 0.1]
        rounds = ROUNDS if self.fault == "stop and continue" else 0
        self.ranks = jobs.enter_context(Ranks(exchange, RANKS, [rounds, seed, 60.0, transport]))

    def happen(self):
        """Wait until all ranks exchange entries; then hit."""
        for rank in range(RANKS):
            self.ranks.wait_for(f"ready{rank}")
        (self.ranks.folder / "go").touch()
        time.sleep(self.moments[0])
        if self.fault != "kill":
            self.signal(signal.SIGSTOP)
            time.sleep(self.moments[1])
        self.killed = time.monotonic()
        self.signal(signal.SIGCONT if self.fault == "stop and continue" else signal.SIGKILL)

    def signal(self, number):
        for victim in self.victims:
            self.ranks.signal(victim, number)

    def check(self):
        """All survivors were told in time who is gone; or a stop did no harm."""
        results = self.ranks.wait(60)
        if self.fault == "stop and continue":
            assert_all_good(results)
        else:
            for sentence in told(results, self.victims, 2, self.killed):
                assert sentence.startswith(tuple(f"{named(victim, RANKS)} died" for victim in self.victims)), sentence
        assert_nothing_is_left(self.ranks, RANKS)


def hit_all(seeds, transport="shared_memory"):
    with ExitStack() as jobs:
        hits = [Hit(seed, jobs, transport) for seed in seeds]
        for hit in hits:
            hit.happen()
        for hit in hits:
            hit.check()


def test_whoever_is_hit_is_named_by_all_others_in_time_and_nothing_is_left():
    hit_all(range(AT_ONCE))


@pytest.mark.full
@pytest.mark.parametrize("first", range(AT_ONCE, 300, AT_ONCE))
def test_whoever_is_hit_is_named_by_all_others_in_time_every_time(first):
    hit_all(range(first, first + AT_ONCE))


def test_whoever_is_hit_is_named_where_entries_lie_in_device_memory():
    hit_all(range(3), "device")


@pytest.mark.full
@pytest.mark.parametrize("first", range(3, 33, AT_ONCE))
def test_whoever_is_hit_is_named_where_entries_lie_in_device_memory_every_time(first):
    hit_all(range(first, first + AT_ONCE), "device")


def kill_while_they_start(seeds, transport="shared_memory"):
    seconds = START_SECONDS * slowness()  # on a busy machine ranks that live may come late
    with ExitStack() as jobs:
        started = []
        for seed in seeds:
            choose = random.Random(seed)
            victim, calls = choose.randrange(RANKS), choose.randint(1, START_CALLS)
            ranks = Ranks(exchange_until_killed, RANKS, [victim, calls, seconds, transport])
            started.append((time.monotonic(), victim, calls, jobs.enter_context(ranks)))
        for since, victim, calls, ranks in started:
            sentences = told(ranks.wait(60 + 2 * seconds), [victim], seconds + 4, since)
            assert any(_names(sentence, victim, seconds) for sentence in sentences), (victim, calls, sentences)
            assert_nothing_is_left(ranks, RANKS)


def _names(sentence, rank, seconds):
    """Whether it tells of this rank, or of one that was gone before it could say which one it is."""
    who = named(rank, RANKS)
    missing = f"waited {seconds:g} s for these ranks to start, in vain: "
    return sentence.startswith((who, "A rank ended during start-up")) or (
        missing in sentence and who.removeprefix("Rank ") in sentence
    )


def test_a_rank_that_is_killed_while_all_start_is_named_by_the_others():
    kill_while_they_start(range(8))


@pytest.mark.full
@pytest.mark.parametrize("first", range(8, 96, 8))
def test_a_rank_that_is_killed_while_all_start_is_named_every_time(first):
    kill_while_they_start(range(first, first + 8))


def kill_all_while_they_start(seeds):
    for seed in seeds:
        with Ranks(exchange, RANKS, [0, seed]) as ranks:
            time.sleep(random.Random(seed).random() * 0.3)
            for rank in range(RANKS):
                ranks.signal(rank, signal.SIGKILL)
            assert told(ranks.wait(60), range(RANKS), 0, 0) == []
            assert_nothing_is_left(ranks, RANKS)


def test_nothing_is_left_of_ranks_that_are_all_killed_while_they_start():
    kill_all_while_they_start(range(3))


@pytest.mark.full
def test_nothing_is_left_of_ranks_that_are_all_killed_while_they_start_every_time():
    kill_all_while_they_start(range(3, 60))
