"""How tuples of tensors lie in memory."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flowtrain_lightning.pool import Address, Key, PoolError, Tier, entry_nbytes
from flowtrain_lightning.pool.entry import erase_entry, outline, read_entry, write_header, write_tensors
from flowtrain_lightning.pool.memory import first_byte_of

KEY = Key(3, 1 << 31, 77, 5)
ADDRESS = Address.of(2, Tier.HOST, 128, 9)
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int8, torch.bool]


def written(tensors):
    lines = outline(tensors)
    memory = bytearray(ADDRESS.offset + lines.nbytes + 64)
    write_tensors(memory, first_byte_of(memory), ADDRESS.offset, tensors, lines)
    write_header(memory, ADDRESS, KEY, lines)
    return memory, lines.nbytes


@given(
    st.lists(st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=8)), max_size=16),
    st.integers(0, 1000),
)
def test_tensors_of_any_shape_and_dtype_come_back_as_they_were(described, seed):
    generator = torch.Generator().manual_seed(seed)
    tensors = [(torch.rand(shape, generator=generator) * 4).to(dtype) for dtype, shape in described]
    memory, nbytes = written(tensors)
    found = read_entry(memory, ADDRESS.offset, nbytes, ADDRESS, KEY)
    assert len(found) == len(tensors)
    for tensor, expected in zip(found, tensors, strict=True):
        assert tensor.dtype == expected.dtype
        assert tensor.shape == expected.shape
        assert torch.equal(tensor, expected)
    assert nbytes == entry_nbytes([tensor.nbytes for tensor in tensors])
    assert not any(memory[ADDRESS.offset + nbytes :]), "nothing is written behind the entry"


def test_what_is_not_contiguous_and_what_has_a_gradient_can_be_put():
    base = torch.arange(24.0).view(4, 6)
    tensors = [base.t(), base[::2, 1::3], base.clone().requires_grad_() * 2]
    memory, nbytes = written(tensors)
    found = read_entry(memory, ADDRESS.offset, nbytes, ADDRESS, KEY)
    assert all(torch.equal(one, other) for one, other in zip(found, tensors, strict=True))
    assert not any(tensor.requires_grad for tensor in found)


def test_tensors_whose_bytes_are_not_what_they_are_can_be_put():
    numbers = torch.complex(torch.arange(3.0), torch.ones(3))
    tensors = [numbers.conj(), numbers.conj().imag, torch.nn.Parameter(torch.arange(5.0)), torch.ones(1).expand(7)]
    memory, nbytes = written(tensors)
    found = read_entry(memory, ADDRESS.offset, nbytes, ADDRESS, KEY)
    assert all(torch.equal(one, other) for one, other in zip(found, tensors, strict=True))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("elements", [16 * 1024 - 1, 16 * 1024, 16 * 1024 + 1])
def test_small_and_large_tensors_are_copied_whole(monkeypatch, elements, threads):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    tensors = [torch.rand(elements), torch.rand(elements).requires_grad_()]
    memory, nbytes = written(tensors)
    found = read_entry(memory, ADDRESS.offset, nbytes, ADDRESS, KEY)
    assert all(torch.equal(one, other) for one, other in zip(found, tensors, strict=True))
    assert not any(memory[ADDRESS.offset + nbytes :])


def test_views_of_an_entry_can_be_leaves_and_writing_one_is_no_change_of_another():
    memory, nbytes = written([torch.ones(4), torch.ones(4)])
    first, second = read_entry(memory, ADDRESS.offset, nbytes, ADDRESS, KEY)
    first.requires_grad_()
    loss = (first**2).sum()
    second.mul_(2)
    loss.backward()
    assert torch.equal(first.grad, torch.full((4,), 2.0))


def test_an_erased_entry_is_stale():
    memory, nbytes = written([torch.ones(4)])
    erase_entry(memory, ADDRESS.offset)
    with pytest.raises(PoolError, match="is stale"):
        read_entry(memory, ADDRESS.offset, nbytes, ADDRESS, KEY)


@pytest.mark.parametrize(
    ("address", "key"), [(Address(ADDRESS - 1), KEY), (ADDRESS, KEY._replace(item=78))], ids=["place", "key"]
)
def test_another_use_of_the_same_place_is_stale(address, key):
    memory, nbytes = written([torch.ones(4)])
    with pytest.raises(PoolError, match="is stale"):
        read_entry(memory, ADDRESS.offset, nbytes, address, key)


@pytest.mark.parametrize("count", [0, 1, 3, 16])
def test_no_flipped_bit_of_a_header_goes_unnoticed(count):
    memory, nbytes = written([torch.ones(4)] * count)
    for bit in range((64 + 80 * count) * 8):
        memory[ADDRESS.offset + bit // 8] ^= 1 << bit % 8
        with pytest.raises(PoolError, match=r"stale|damaged"):
            read_entry(memory, ADDRESS.offset, nbytes, ADDRESS, KEY)
        memory[ADDRESS.offset + bit // 8] ^= 1 << bit % 8
    read_entry(memory, ADDRESS.offset, nbytes, ADDRESS, KEY)


@pytest.mark.parametrize("nbytes", [0, 63, 64, 192, 1 << 20])
def test_a_size_that_was_published_wrongly_is_refused(nbytes):
    memory, _ = written([torch.ones(40)])
    with pytest.raises(PoolError):
        read_entry(memory, ADDRESS.offset, nbytes, ADDRESS, KEY)


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
        outline(tensors)
