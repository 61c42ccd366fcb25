"""CURVE keys: who does not know the job's secret is not admitted, and is not believed."""

from contextlib import contextmanager

import pytest
import zmq

from flowtrain_lightning.pool.between_hosts.curve import admit, curve_key

SECRET, OTHER = "the job's secret", "the secret of another job"


def test_every_rank_has_a_key_of_its_own_which_all_others_know():
    keys = [curve_key(SECRET, rank, 4) for rank in range(4)]
    assert len({key.public for key in keys}) == 4
    assert keys[2] == curve_key(SECRET, 2, 4)


def test_keys_of_another_job_or_another_number_of_ranks_differ():
    keys = {curve_key(secret, 0, ranks).public for secret in (SECRET, OTHER) for ranks in (2, 3)}
    assert len(keys) == 4


@contextmanager
def rank_0(own, server, is_admitting=True):
    """The socket of rank 0, to which one speaks that has the key ``own`` and takes the other end for ``server``."""
    context = zmq.Context()
    router, dealer = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    ranks = frozenset(curve_key(SECRET, rank, 2).public for rank in range(2))
    authenticator = admit(router, curve_key(SECRET, 0, 2), ranks)
    try:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        if not is_admitting:
            authenticator.stop()
        dealer.curve_publickey, dealer.curve_secretkey = own
        dealer.curve_serverkey = server.public
        dealer.connect(f"tcp://127.0.0.1:{port}")
        dealer.send(b"hello")
        yield router
    finally:
        dealer.close(0)
        router.close(0)
        authenticator.stop()
        context.term()


def test_a_rank_of_the_job_is_admitted():
    with rank_0(curve_key(SECRET, 1, 2), curve_key(SECRET, 0, 2)) as router:
        assert router.poll(20_000)
        assert router.recv_multipart()[1] == b"hello"


@pytest.mark.parametrize(
    ("own", "server"),
    [
        (curve_key(OTHER, 1, 2), curve_key(SECRET, 0, 2)),
        (curve_key(SECRET, 1, 2), curve_key(OTHER, 0, 2)),
        (curve_key(OTHER, 1, 2), curve_key(OTHER, 0, 2)),
    ],
    ids=["has another key", "expects another key", "knows neither"],
)
def test_whoever_knows_not_all_of_it_is_kept_out(own, server):
    with rank_0(own, server) as router:
        assert not router.poll(500)


def test_nobody_is_admitted_when_nobody_answers_for_it():
    with rank_0(curve_key(SECRET, 1, 2), curve_key(SECRET, 0, 2), is_admitting=False) as router:
        assert not router.poll(500)
