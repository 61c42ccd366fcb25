"""Attention by the kernel that the code of a published run takes, where its source says which: shares of the peak.

- llm-foundry: FlashAttention in Triton, the default of ``--attn_impl``, but flash-attn 2.4.2 on 128 devices and more
  (``scripts/train/benchmarking`` at 5e85bd62: ``sweep.py``, ``submit_benchmarks.py``).
- Megatron-LM and NeMo on Hopper: cuDNN's, which Transformer Engine prefers there (NVIDIA/NeMo#9188).
- Optimus and DIP do not say; what plans assume stands for them.

cuDNN's rates were taken for the 24 mixtures of ``benchmarks/published_mixtures.py`` (median error 18.6 %; 25.5 % with
what plans assume); HetPar's times were no part of that choice. The 18 rows of llm-foundry that ran flash-attn 2, left
out of the fit, are missed by 7.6 % with its rates and by 1.8 % with the other rows', which all rows keep therefore.
"""

from __future__ import annotations

from flowtrain_lightning.allocator import named_device
from flowtrain_lightning.allocator.flops import FLASH_BACKWARD
from flowtrain_lightning.allocator.kernels import ATTENTION_RAMP

CUDNN_ATTENTION = {64: (408e12, 363e12, 417e12), 128: (609e12, 518e12, 499e12)}
"""Size of a head -> FLOP/s of cuDNN's fused attention on an H100 with sequences of 4,096: forward, forward where a
token sees those before it alone, backward (printed in arXiv 2407.08608, figures 5 and 6)."""

_MEASURED_WITH = 4096
"""Tokens of a sequence there."""


def cudnn_share(head_size: int) -> float:
    """Share of an H100's peak that cuDNN's causal attention reaches over long sequences, forward and backward together.

    The backward is assumed to be slowed by the mask as the forward is, and Blackwell to reach the same share.

    Args:
        head_size: a key of `CUDNN_ATTENTION`.
    """
    whole, forward, backward = CUDNN_ATTENTION[head_size]
    rate = (1 + FLASH_BACKWARD) / (1 / forward + FLASH_BACKWARD / (backward * forward / whole))
    return rate / named_device("h100").peak * (_MEASURED_WITH + ATTENTION_RAMP) / _MEASURED_WITH
