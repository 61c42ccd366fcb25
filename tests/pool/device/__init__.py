"""Tests of the pool's device tier: over a simulated device everywhere, over CUDA where there is a GPU."""
