"""What one process computes: the user's methods on one batch, and whole steps where nobody else takes part."""
