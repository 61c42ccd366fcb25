"""The chunked cross entropy is PyTorch's own, and never holds the scores of more tokens than a chunk has."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from flowtrain_lightning.compute.cross_entropy import summed_cross_entropy

TOKENS, WIDTH, VOCABULARY = 37, 8, 101


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that any result has had."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.elements = max(self.elements, result.numel())
        return result


def inputs(dtype=torch.float64):
    torch.manual_seed(0)
    head = nn.Linear(WIDTH, VOCABULARY, dtype=dtype)
    hidden = torch.randn(TOKENS, WIDTH, dtype=dtype, requires_grad=True)
    return head, hidden, torch.randint(VOCABULARY, (TOKENS,))


@pytest.mark.parametrize("chunk", [1, 5, TOKENS, 1000])
def test_loss_and_gradients_are_those_of_pytorch(chunk):
    head, hidden, labels = inputs()
    loss = summed_cross_entropy(head, hidden, labels, chunk)
    expected = functional.cross_entropy(head(hidden), labels, reduction="sum")
    wanted = [hidden, *head.parameters()]
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=0)
    found, reference = torch.autograd.grad(3 * loss, wanted), torch.autograd.grad(3 * expected, wanted)
    torch.testing.assert_close(found, reference, rtol=1e-10, atol=1e-12)


def test_no_more_scores_exist_at_a_time_than_those_of_a_chunk():
    head, hidden, labels = inputs()
    with LargestTensor() as largest:
        summed_cross_entropy(head, hidden, labels, chunk=4).backward()
    assert largest.elements <= max(4 * VOCABULARY, WIDTH * VOCABULARY)


def test_scores_of_half_precision_are_summed_in_float32():
    head, hidden, labels = inputs(torch.bfloat16)
    assert summed_cross_entropy(head, hidden, labels, chunk=4).dtype == torch.float32


def test_without_targets_the_loss_is_nothing():
    head, hidden, labels = inputs()
    loss = summed_cross_entropy(head, hidden[:0], labels[:0])
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert not hidden.grad.any()
