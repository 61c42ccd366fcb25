"""Entries: their names, and how tuples of tensors lie in memory."""

import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.pool import Address, Key, PoolError, Tier, entry_nbytes
from flowtrain_lightning.pool.control_records import ControlRecord, Kind
from flowtrain_lightning.pool.entry import (
    erase_header,
    lay_out_tensors,
    read_tensors,
    write_header,
    write_tensors,
)
from flowtrain_lightning.pool.shared_memory import first_byte_of

START = 128
KEY = Key(3, 1 << 31, 77, 5)
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool]


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


def written(tensors):
    """Memory with an entry of these tensors, and the record that publishes it."""
    layout = lay_out_tensors(tensors)
    memory = bytearray(START + layout.nbytes + 64)
    address = Address.of(2, Tier.HOST, START, 9)
    published = ControlRecord(Kind.PUBLISH, 2, 1, KEY.channel, KEY.pack(), address, layout.nbytes)
    write_tensors(memory, first_byte_of(memory), START, tensors, layout)
    write_header(memory, START, published, layout)
    return memory, published


def header_bytes(tensors):
    return 40 + sum(8 + 8 * tensor.dim() for tensor in tensors)


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=8)), max_size=16),
    st.integers(0, 1000),
)
def test_tensors_of_any_shape_and_dtype_come_back_as_they_were(described, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = [(torch.rand(shape, generator=generator) * 4).to(dtype) for dtype, shape in described]
    memory, published = written(tensors)
    found = read_tensors(memory, START, published)
    assert len(found) == len(tensors)
    for tensor, expected in zip(found, tensors, strict=True):
        assert tensor.dtype == expected.dtype
        assert tensor.shape == expected.shape
        assert torch.equal(tensor, expected)
    assert published.size == entry_nbytes([tensor.nbytes for tensor in tensors])
    assert not any(memory[START + published.size :]), "nothing is written behind the entry"


def test_what_is_not_contiguous_and_what_has_a_gradient_can_be_put():
    base = torch.arange(24.0).view(4, 6)
    tensors = [base.t(), base[::2, 1::3], base.clone().requires_grad_() * 2]
    memory, published = written(tensors)
    found = read_tensors(memory, START, published)
    assert all(torch.equal(one, other) for one, other in zip(found, tensors, strict=True))
    assert not any(tensor.requires_grad for tensor in found)


def test_tensors_whose_bytes_are_not_what_they_are_can_be_put():
    numbers = torch.complex(torch.arange(3.0), torch.ones(3))
    tensors = [numbers.conj(), numbers.conj().imag, torch.nn.Parameter(torch.arange(5.0)), torch.ones(1).expand(7)]
    memory, published = written(tensors)
    found = read_tensors(memory, START, published)
    assert all(torch.equal(one, other) for one, other in zip(found, tensors, strict=True))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("elements", [16 * 1024 - 1, 16 * 1024, 16 * 1024 + 1])
def test_small_and_large_tensors_are_copied_whole(monkeypatch, elements, threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    tensors = [torch.rand(elements), torch.rand(elements).requires_grad_()]
    memory, published = written(tensors)
    found = read_tensors(memory, START, published)
    assert all(torch.equal(one, other) for one, other in zip(found, tensors, strict=True))
    assert not any(memory[START + published.size :])


def test_views_can_be_leaves_and_writing_one_is_no_change_of_another():
    memory, published = written([torch.ones(4, 1), torch.ones(4, 1)])
    first, second = read_tensors(memory, START, published)
    first.requires_grad_()
    loss = (first**2).sum()
    second.mul_(2)
    loss.backward()
    assert torch.equal(first.grad, torch.full((4, 1), 2.0))


def test_an_entry_whose_header_was_erased_is_stale():
    memory, published = written([torch.ones(4)])
    erase_header(memory, START)
    with pytest.raises(PoolError, match="is stale"):
        read_tensors(memory, START, published)


@pytest.mark.parametrize(
    "change",
    [{"address": Address.of(2, Tier.HOST, START, 8)}, {"number": KEY._replace(item=78).pack()}, {"channel": 4}],
    ids=["another generation", "another item", "another channel"],
)
def test_another_entry_than_was_published_is_stale(change):
    memory, published = written([torch.ones(4)])
    with pytest.raises(PoolError, match="is stale"):
        read_tensors(memory, START, published._replace(**change))


@pytest.mark.parametrize("shapes", [[], [(4,)], [(4,), (), (2, 0, 3)], [(1,)] * 16])
def test_no_flipped_bit_of_a_header_goes_unnoticed(shapes):
    tensors = [torch.ones(shape) for shape in shapes]
    memory, published = written(tensors)
    for bit in range(header_bytes(tensors) * 8):
        memory[START + bit // 8] ^= 1 << bit % 8
        with pytest.raises(PoolError, match=r"stale|damaged"):
            read_tensors(memory, START, published)
        memory[START + bit // 8] ^= 1 << bit % 8
    read_tensors(memory, START, published)


@pytest.mark.parametrize("nbytes", [0, 39, 40, 128, 192, 1 << 20])
def test_a_size_that_was_published_wrongly_is_refused(nbytes):
    memory, published = written([torch.ones(40)])
    with pytest.raises(PoolError):
        read_tensors(memory, START, published._replace(size=nbytes))


@pytest.mark.parametrize(
    ("offset", "value"),
    [(4, 255), (6, 17), (6, 2), (40, 14), (41, 9), (41, 8), (48, 60)],
    ids=["length", "count", "no such tensor", "dtype", "too many dimensions", "more dimensions", "shape"],
)
def test_an_untrue_header_is_refused_though_its_checksum_is_right(offset, value):
    memory, published = written([torch.ones(40)])
    memory[START + offset] = value
    length = int.from_bytes(memory[START + 4 : START + 6], "little")
    memory[START : START + 4] = zlib.crc32(memory[START + 4 : START + length]).to_bytes(4, "little")
    with pytest.raises(PoolError, match=r"damaged|not as large as the entry"):
        read_tensors(memory, START, published)


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([torch.ones(1)] * 17, "17 tensors"),
        ([torch.ones([1] * 9)], "at most 8 dimensions"),
        ([torch.zeros(1, dtype=torch.uint16)], "uint16 cannot pass"),
    ],
)
def test_what_no_header_can_describe_is_refused(tensors, words):
    with pytest.raises(PoolError, match=words):
        lay_out_tensors(tensors)
