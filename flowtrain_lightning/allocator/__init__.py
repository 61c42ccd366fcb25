"""Allocator: which ranks play which role, in which layout."""
