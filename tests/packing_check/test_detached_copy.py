"""The copy of a module shares with it only what nobody can copy."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from flowtrain_lightning.packing_check import detached_copy
from tests.tiny import TinyVLM


class Helper:
    """Points back at its module, and holds a lock in a list."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.locks = module, [threading.Lock()]


def test_what_points_back_at_the_module_points_at_the_copy():
    module: Any = TinyVLM()
    module.helper = Helper(module)
    module.configure_model()
    copied = detached_copy(module)
    assert copied.helper is not module.helper
    assert copied.helper.module is copied
    assert copied.helper.locks[0] is module.helper.locks[0]
    assert copied.backbone.head.weight is not module.backbone.head.weight
    assert torch.equal(copied.backbone.head.weight, module.backbone.head.weight)


def test_a_tensor_that_was_kept_from_a_step_is_shared():
    module: Any = TinyVLM()
    module.configure_model()
    module.kept = module.backbone.head.weight * 2
    assert detached_copy(module).kept is module.kept
