"""The 64-bit address of an entry."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.pool import Address, Tier
from flowtrain_lightning.pool.address import ALIGNMENT, GENERATIONS, MAX_OWNERS, MAX_SEGMENT_BYTES, aligned

addresses = st.builds(
    Address,
    owner=st.integers(0, MAX_OWNERS - 1),
    tier=st.sampled_from(Tier),
    offset=st.integers(0, MAX_SEGMENT_BYTES // ALIGNMENT - 1).map(lambda place: place * ALIGNMENT),
    generation=st.integers(0, GENERATIONS - 1),
)


@given(addresses)
def test_every_address_is_one_number_of_64_bits_and_back(address):
    number = address.pack()
    assert 0 <= number < 1 << 64
    assert Address.unpack(number) == address


@given(addresses, addresses)
def test_different_addresses_are_different_numbers(one, other):
    assert (one.pack() == other.pack()) == (one == other)


@pytest.mark.parametrize(
    ("owner", "offset", "generation"),
    [(MAX_OWNERS, 0, 0), (-1, 0, 0), (0, 1, 0), (0, MAX_SEGMENT_BYTES, 0), (0, -ALIGNMENT, 0), (0, 0, GENERATIONS)],
)
def test_what_does_not_fit_the_bits_is_refused(owner, offset, generation):
    with pytest.raises(ValueError, match="is no address: expected an owner below"):
        Address(owner, Tier.HOST, offset, generation).pack()


@pytest.mark.parametrize("number", [-1, 1 << 64])
def test_a_number_of_more_than_64_bits_is_refused(number):
    with pytest.raises(ValueError, match="64 bits"):
        Address.unpack(number)


@given(st.integers(0, 1 << 40))
def test_alignment_rounds_up_and_by_less_than_one_place(nbytes):
    assert aligned(nbytes) % ALIGNMENT == 0
    assert 0 <= aligned(nbytes) - nbytes < ALIGNMENT
