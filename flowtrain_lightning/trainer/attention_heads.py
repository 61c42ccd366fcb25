"""Refuses context ranks that cannot share a backbone's attention heads, before any of them computes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from flowtrain_lightning.allocator import Layout
from flowtrain_lightning.allocator.candidates import why_heads_cannot_be_shared
from flowtrain_lightning.compute.step_metrics import MetricAccumulator
from flowtrain_lightning.data.batch import IGNORED_LABEL, PackedBatch
from flowtrain_lightning.data.loading.collate import pack_sequences
from flowtrain_lightning.data.records.conversation import TokenSequence
from flowtrain_lightning.module import FlowModule
from flowtrain_lightning.parallel.context_parallel import noting_heads
from flowtrain_lightning.parallel.ranks.random_streams import own_streams
from flowtrain_lightning.placement.meta_device import MetaTensorMode, copy_on_meta

_TOKENS = 8


def refuse_unshared_heads(layouts: Mapping[str, Layout], module: FlowModule) -> None:
    """Raises where context ranks are to share attention heads of which each would get a part.

    Args:
        layouts: role -> its layout.
        module: that trains, with its halves whole. It is left as it is.

    Raises:
        ValueError: names the number of heads, and a degree that would do.
    """
    trunk = module.role_graph.trunk
    layout = layouts[trunk]
    if layout.context == 1:
        return
    for heads in sorted(attention_heads(module)):
        if (reason := why_heads_cannot_be_shared(trunk, heads, layout.tensor, layout.context)) is not None:
            raise ValueError(reason)


def attention_heads(module: FlowModule) -> set[int]:
    """The numbers of heads with which the backbone calls `varlen_attention` on a few tokens of text.

    It runs on the meta device, where nothing is computed. What cannot run there tells nothing: empty.
    """
    found: set[int] = set()
    try:
        copy = copy_on_meta(module)
        with own_streams(), copy.logging_into(MetricAccumulator()), MetaTensorMode(), noting_heads(found):
            copy.backbone_step(_text(), {}, "train")
    except Exception:  # of the user's methods, which need not run without weights: the run itself will tell
        return found
    return found


def _text() -> PackedBatch:
    """One sample without media, all of whose tokens but the last are targets."""
    tokens = np.arange(_TOKENS) % 2
    labels = np.append(tokens[1:], IGNORED_LABEL)
    nothing = np.empty(0, dtype=np.int64)
    return pack_sequences([TokenSequence(tokens, labels, nothing, nothing, nothing)], [0])
