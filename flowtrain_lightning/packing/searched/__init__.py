"""Runs of layers of several roles on the same ranks, and the order of their works that a search finds from costs."""
