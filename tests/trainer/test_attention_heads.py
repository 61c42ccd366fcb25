"""Heads that context ranks cannot share are refused before any of them computes, whatever the module calls them."""

from __future__ import annotations

import pytest

from flowtrain_lightning.allocator import Layout
from flowtrain_lightning.trainer.attention_heads import attention_heads, refuse_unshared_heads
from tests.exactness.modules import Divided
from tests.tiny import TinyVLM


class WithoutSamples(Divided):
    """Cannot run without pictures."""

    def merge(self, batch, features):
        return super().merge(batch, {"image": features["image"]})


def built(kind):
    module = kind()
    module.configure_model()
    return module


def test_the_heads_are_those_that_attention_is_called_with():
    assert attention_heads(built(Divided)) == {4}  # over two of keys and values
    assert attention_heads(built(TinyVLM)) == {2}


def test_a_module_that_does_not_run_on_text_alone_tells_nothing():
    assert attention_heads(built(WithoutSamples)) == set()


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(1, context=3), "attention heads, 4, cannot be shared by 3 context ranks: .* degree of 2 or 4"),
        (Layout(1, tensor=2, context=4), "by 2 tensor x 4 context ranks"),
    ],
)
def test_a_context_degree_that_divides_no_heads_is_refused(layout, words):
    module = built(Divided)
    refuse_unshared_heads({"encoder": Layout(1), "backbone": Layout(1, context=4)}, module)
    with pytest.raises(ValueError, match=words):
        refuse_unshared_heads({"encoder": Layout(1), "backbone": layout}, module)
