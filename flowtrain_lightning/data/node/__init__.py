"""One process of a node reads for all its ranks."""
