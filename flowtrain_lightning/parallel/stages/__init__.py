"""A half cut into stages, each of some of its blocks."""
