"""Only so much is on its way to a rank; all else waits in order."""

from flowtrain_lightning.pool.between_hosts.outbox import Outbox


def sent_by(outbox):
    found = []
    while outbox.ready:
        found.append(outbox.first())
        outbox.is_sent()
    return found


def test_messages_wait_in_order_until_those_before_them_have_arrived():
    outbox = Outbox(b"1/records", window=2)
    for message in (b"a", b"b", b"c", b"d", b"e"):
        outbox.add(message)
    assert sent_by(outbox) == [b"a", b"b"]
    assert outbox.acknowledge(1)
    assert sent_by(outbox) == [b"c"]
    assert outbox.acknowledge(3)
    assert sent_by(outbox) == [b"d", b"e"]
    assert not outbox.settled
    assert outbox.acknowledge(5)
    assert outbox.settled


def test_more_than_was_sent_or_less_than_before_cannot_have_arrived():
    outbox = Outbox(b"1/records", window=2)
    outbox.add(b"a")
    sent_by(outbox)
    assert not outbox.acknowledge(2)
    assert outbox.acknowledge(1)
    assert not outbox.acknowledge(0)


def test_of_pages_only_the_newest_waits():
    outbox = Outbox(b"1/pages", window=1)
    for page in (b"old", b"new"):
        outbox.replace(page)
    assert sent_by(outbox) == [b"new"]


def test_nothing_is_waited_for_from_a_rank_that_is_lost():
    outbox = Outbox(b"1/records", window=1)
    for message in (b"a", b"b"):
        outbox.add(message)
    sent_by(outbox)
    outbox.drop()
    assert outbox.settled
    assert not outbox.ready
