"""Where ranks run, and how that is told."""

import pytest

from flowtrain_lightning.pool import PoolError, address_of, address_towards, describe_ways, interface_of
from flowtrain_lightning.pool.between_hosts.location import own_location


def test_a_process_is_where_it_is_and_says_so_in_one_word():
    assert own_location() == own_location()
    assert len(own_location().split()) == 1


def test_the_own_address_is_one_of_this_machine():
    assert address_towards("127.0.0.1").count(".") == 3


def test_a_host_that_does_not_exist_is_named():
    with pytest.raises(PoolError, match=r"no way from here to 'no-such-host\.invalid'"):
        address_towards("no-such-host.invalid")


def test_an_interface_and_its_address_lead_to_each_other():
    assert address_of("lo") == "127.0.0.1"
    assert interface_of("127.0.0.1") == "lo"


def test_what_is_no_interface_or_nobodys_address_leads_nowhere():
    assert address_of("no-such-one") is None
    assert interface_of("192.0.2.1") is None


@pytest.mark.parametrize(
    ("locations", "line"),
    [
        ("aaaa", "ranks 0-3 by shared memory"),
        ("ab", "rank 0; rank 1; between these 2 hosts by network"),
        ("aabb", "ranks 0-1 by shared memory; ranks 2-3 by shared memory; between these 2 hosts by network"),
        ("abab", "ranks 0, 2 by shared memory; ranks 1, 3 by shared memory; between these 2 hosts by network"),
    ],
)
def test_one_line_says_who_is_connected_how(locations, line):
    assert describe_ways(locations) == line


def test_many_hosts_still_fit_into_a_line():
    line = describe_ways([f"host {rank // 8}" for rank in range(1024)])
    assert len(line) < 400
    assert line.endswith("; between these 128 hosts by network")
