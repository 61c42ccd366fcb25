"""Parallel: puts a layout onto a half."""

from flowtrain_lightning.parallel.replicate import broadcast_half, reduce_gradients

__all__ = ["broadcast_half", "reduce_gradients"]
