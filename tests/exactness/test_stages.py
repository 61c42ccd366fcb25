"""Roles in stages (pipeline): losses, gradients and weights are those of a plain PyTorch loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.exactness.compare import Run
from tests.exactness.test_sharded import CUT, Case, check_against_plain_loop, run  # noqa: F401

PIPELINE = {"pipeline": 2}

QUICK = [
    Case("1+2", {"backbone": PIPELINE}, clip=0.2),
    Case("colocated 2", {"backbone": PIPELINE}, strategy={"encoder_activations": 1}, clip=0.2, data=CUT),
]
LONG = [
    Case("2+4", {"encoder": {"shard": "fsdp"}, "backbone": {**PIPELINE, "recompute": "full"}}, "32-true", data=CUT),
    Case("1+4", {"backbone": {**PIPELINE, "shard": "fsdp"}}, clip=0.2),
    Case("2+6", {"backbone": {"pipeline": 3, "shard": "fsdp", "recompute": "full"}}, "32-true", data=CUT),
    Case("1+2", {"backbone": PIPELINE}, freeze=True),
    Case("1+3", {"backbone": {"pipeline": 3}}, "32-true", {"encoder_activations": 0}, clip=0.2, data=CUT),
    Case("1+4", {"backbone": {"pipeline": 4, "recompute": "selective"}}, strategy={"encoder_activations": 1}, data=CUT),
    Case("colocated 4", {"backbone": PIPELINE}, "32-true", {"encoder_activations": 0}, clip=0.2),
    Case("colocated 3", {"backbone": {"pipeline": 3}}, freeze=True),
    Case("2+6", {"backbone": {"pipeline": 3}}, clip=0.2, kernel="foreach"),
]
TENSOR = {**PIPELINE, "tensor": 2}
CONTEXT = {**PIPELINE, "context": 2}
VIRTUAL = {**PIPELINE, "virtual": 2}
HSDP = {**PIPELINE, "shard": "fsdp", "replicas": 2}
LONG += [
    Case("1+4", {"backbone": TENSOR}, clip=0.2, kind="divided", data=CUT),
    Case("2+4", {"backbone": {**TENSOR, "recompute": "full"}}, "32-true", kind="divided tokens", data=CUT),
    Case("1+8", {"backbone": {**TENSOR, "shard": "fsdp"}}, clip=0.2, kind="divided tokens"),
    Case("1+8", {"backbone": HSDP}, clip=0.2),
    Case("2+8", {"encoder": {"shard": "fsdp"}, "backbone": {**HSDP, "recompute": "selective"}}, "32-true", data=CUT),
    Case("colocated 4", {"backbone": {**PIPELINE, "shard": "fsdp"}}, clip=0.2, data=CUT),
    Case("colocated 4", {"backbone": TENSOR}, "32-true", {"encoder_activations": 1}, kind="divided tokens"),
    Case("mixed 1+2", {"backbone": PIPELINE}, clip=0.2, data=CUT),
    Case("1+4", {"backbone": {**CONTEXT, "recompute": "full"}}, clip=0.2, kind="divided", data=CUT),
    Case("1+8", {"backbone": {**CONTEXT, "tensor": 2}}, "32-true", kind="divided tokens"),
    Case("colocated 4", {"backbone": {**CONTEXT, "shard": "fsdp"}}, clip=0.2, kind="divided"),
    Case("1+2", {"backbone": VIRTUAL}, clip=0.2, data=CUT),
    Case("2+4", {"backbone": {**VIRTUAL, "shard": "fsdp", "recompute": "full"}}, "32-true", data=CUT),
    Case("1+4", {"backbone": {**VIRTUAL, "context": 2}}, clip=0.2, kind="four divided blocks"),
    Case("1+4", {"backbone": {"pipeline": 4}}, "32-true", data={"token_budget": 4096}),  # one microbatch
    Case("mixed 1+4", {"backbone": {**PIPELINE, "shard": "fsdp"}}, "32-true", {"encoder_activations": 1}),
]
SPLIT = {**PIPELINE, "schedule": "zb-h1"}
V = {**PIPELINE, "schedule": "zb-v"}
LONG += [
    Case("1+2", {"backbone": SPLIT}, clip=0.2, data=CUT),
    Case("2+3", {"backbone": {**SPLIT, "pipeline": 3, "recompute": "full"}}, "32-true", data=CUT),
    Case("2+6", {"backbone": {**SPLIT, "pipeline": 3}}, clip=0.2),
    Case("colocated 3", {"backbone": {**SPLIT, "pipeline": 3}}, "32-true", {"encoder_activations": 1}, data=CUT),
    Case("1+4", {"backbone": {**SPLIT, "context": 2}}, clip=0.2, kind="divided", data=CUT),
    Case("1+2", {"backbone": V}, clip=0.2, data=CUT),
    Case("2+3", {"backbone": {**V, "pipeline": 3, "recompute": "selective"}}, clip=0.2, kind="six divided blocks"),
    Case("1+4", {"backbone": V}, "32-true", {"encoder_activations": 0}, data=CUT),
    Case("1+2", {"backbone": V}, freeze=True),
    Case("1+3", {"backbone": {"pipeline": 3, "cut": "number"}}, clip=0.2, kind="eight divided blocks", data=CUT),
    Case("1+2", {"backbone": {**V, "cut": "number"}}, clip=0.2, kind="six divided blocks", data=CUT),
]
LONG += [  # with those above, each number of stages, order, layout of a stage and placement meets all of the others
    Case("1+6", {"backbone": {**VIRTUAL, "pipeline": 3, "tensor": 2}}, clip=0.2, kind="six divided blocks"),
    Case("1+8", {"backbone": {**VIRTUAL, "pipeline": 4, "context": 2}}, clip=0.2, kind="eight divided blocks"),
    Case("1+8", {"backbone": {**V, "pipeline": 4, "context": 2}}, clip=0.2, kind="eight divided blocks", data=CUT),
    Case("1+8", {"backbone": {"pipeline": 4, "shard": "fsdp"}}, clip=0.2, data=CUT),
    Case("mixed 1+4", {"backbone": {**SPLIT, "pipeline": 4, "recompute": "full"}}, clip=0.2, data=CUT),
    Case("colocated 4", {"backbone": {"pipeline": 4, "recompute": "selective"}}, "32-true", {"encoder_activations": 1}),
    Case("mixed 1+8", {"backbone": {"pipeline": 4, "tensor": 2}}, clip=0.2, kind="four divided blocks"),
    Case("mixed 1+6", {"backbone": {"pipeline": 3, "context": 2}}, "32-true", kind="divided", data=CUT),
]
BOTH = {"encoder": PIPELINE, "backbone": PIPELINE}
ENCODER = {"encoder": PIPELINE}
ONE_KEPT = {"encoder_activations": 1}
QUICK += [Case("colocated 2", BOTH, strategy={"encoder_activations": 1}, clip=0.2, data=CUT)]
LONG += [
    Case("colocated 2", BOTH, freeze=True, data=CUT),
    Case("2+2", BOTH, "32-true", {"encoder_activations": 0}, clip=0.2, data=CUT),
    Case("2+2", BOTH, freeze=True, clip=0.2),
    Case("colocated 2", ENCODER, "32-true", clip=0.2, data=CUT),  # the backbone in whole copies
    Case("2+1", {"encoder": {**PIPELINE, "recompute": "full"}}, strategy={"encoder_activations": 1}, data=CUT),
    Case("3+2", {"encoder": {"pipeline": 3}, "backbone": {"shard": "fsdp"}}, clip=0.2, data=CUT),
    Case("4+4", {"encoder": PIPELINE, "backbone": {**PIPELINE, "shard": "fsdp"}}, "32-true", data=CUT),
    Case("2+2", {"encoder": PIPELINE, "backbone": V}, clip=0.2, data=CUT),
    Case("colocated 4", {"encoder": PIPELINE, "backbone": {"pipeline": 4}}, clip=0.2, data=CUT),
    Case("colocated 2", {"encoder": PIPELINE, "backbone": SPLIT}, strategy={"encoder_activations": 2}, data=CUT),
]
SHARDS = {**PIPELINE, "shard": "fsdp"}
LONG += [  # stages of an encoder whose ranks need each other
    Case("4+1", {"encoder": SHARDS}, clip=0.2, data=CUT),
    Case("4+2", {"encoder": {**SHARDS, "recompute": "full"}, "backbone": PIPELINE}, "32-true", ONE_KEPT, data=CUT),
    Case("4+2", {"encoder": SHARDS, "backbone": {"shard": "fsdp"}}, freeze=True),
    Case("4+3", {"encoder": SHARDS, "backbone": {**SPLIT, "pipeline": 3}}, strategy=ONE_KEPT, data=CUT),
    Case("colocated 4", {"encoder": SHARDS}, "32-true", {"encoder_activations": 0}, clip=0.2, data=CUT),
    Case("colocated 4", {"encoder": SHARDS, "backbone": SHARDS}, strategy=ONE_KEPT, clip=0.2, data=CUT),
    Case("colocated 4", {"encoder": SHARDS, "backbone": {"pipeline": 4}}, strategy={"encoder_activations": 2}),
    Case("colocated 4", {"encoder": {"shard": "fsdp"}, "backbone": PIPELINE}, clip=0.2, data=CUT),
    Case("colocated 4", {"encoder": PIPELINE, "backbone": {"shard": "fsdp"}}, "32-true", data=CUT),
    Case("colocated 8", {"encoder": {**SHARDS, "replicas": 2}, "backbone": {"pipeline": 4}}, clip=0.2, data=CUT),
    Case("4+1", {"encoder": TENSOR}, clip=0.2, kind="divided tower", data=CUT),
    Case("4+2", {"encoder": TENSOR, "backbone": {"context": 2}}, "32-true", ONE_KEPT, kind="divided tower"),
    Case("colocated 4", {"encoder": TENSOR, "backbone": TENSOR}, strategy=ONE_KEPT, kind="divided tower", data=CUT),
    Case("colocated 4", {"encoder": TENSOR, "backbone": SHARDS}, "32-true", clip=0.2, kind="divided tower"),
    Case("colocated 8", {"encoder": {**TENSOR, "shard": "fsdp"}}, clip=0.2, kind="divided tower", data=CUT),
]
CASES = [pytest.param(case, id=str(case)) for case in QUICK] + [
    pytest.param(case, id=str(case), marks=pytest.mark.full) for case in LONG
]


@pytest.mark.parametrize("case", CASES)
def test_training_in_stages_is_that_of_the_plain_loop(run: Callable[..., Run], case: Case):  # noqa: F811
    check_against_plain_loop(run, case)
