"""Callbacks: progress, timeline, preemption."""
