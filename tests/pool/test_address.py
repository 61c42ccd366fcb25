"""The 64-bit address of an entry."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.pool import Address, Tier
from flowtrain_lightning.pool.address import ALIGNMENT, GENERATIONS, MAX_OWNERS, MAX_SEGMENT_BYTES, aligned

parts = st.tuples(
    st.integers(0, MAX_OWNERS - 1),
    st.sampled_from(Tier),
    st.integers(0, MAX_SEGMENT_BYTES // ALIGNMENT - 1).map(lambda number: number * ALIGNMENT),
    st.integers(0, GENERATIONS - 1),
)


@given(parts)
def test_every_address_is_one_number_of_64_bits_with_named_parts(of):
    address = Address.of(*of)
    assert 0 <= address < 1 << 64
    assert (address.owner, address.tier, address.offset, address.generation) == of
    assert Address(int(address)) == address


@given(parts, parts)
def test_different_addresses_are_different_numbers(one, other):
    assert (Address.of(*one) == Address.of(*other)) == (one == other)


@pytest.mark.parametrize(
    ("owner", "offset", "generation"),
    [(MAX_OWNERS, 0, 0), (-1, 0, 0), (0, 1, 0), (0, MAX_SEGMENT_BYTES, 0), (0, -ALIGNMENT, 0), (0, 0, GENERATIONS)],
)
def test_what_does_not_fit_the_bits_is_refused(owner, offset, generation):
    with pytest.raises(ValueError, match="make no address: expected an owner below"):
        Address.of(owner, Tier.HOST, offset, generation)


def test_an_address_is_printed_with_its_parts():
    assert str(Address.of(3, Tier.HOST, 128, 9)) == "Address(owner=3, tier=HOST, offset=128, generation=9)"


@given(st.integers(0, 1 << 40))
def test_alignment_rounds_up_and_by_less_than_one_place(nbytes):
    assert aligned(nbytes) % ALIGNMENT == 0
    assert 0 <= aligned(nbytes) - nbytes < ALIGNMENT
