"""The names of entries."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.pool import Key, PoolError


@pytest.mark.parametrize(
    "key", [Key(256, 0, 0), Key(0, 1 << 32, 0), Key(0, 0, 1 << 24), Key(0, 0, 0, 256), Key(0, -1, 0), Key(0, 0, 0, -1)]
)
def test_a_key_outside_of_its_bits_is_refused(key):
    with pytest.raises(PoolError, match="is no key"):
        key.pack()


@given(
    st.builds(
        Key,
        st.integers(0, 255),
        st.integers(0, (1 << 32) - 1),
        st.integers(0, (1 << 24) - 1),
        st.integers(0, 255),
    )
)
def test_every_key_comes_back_from_its_number(key):
    assert 0 <= key.pack() < 1 << 64
    assert Key.unpack(key.channel, key.pack()) == key


def test_a_key_names_the_whole_unless_it_names_a_part():
    assert Key(1, 2, 3) == Key(1, 2, 3, part=0)
