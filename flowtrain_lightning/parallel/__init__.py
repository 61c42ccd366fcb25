"""Parallel: puts a layout onto a half."""
