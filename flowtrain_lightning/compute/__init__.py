"""The computation of one process: the user's methods on one batch, and whole steps of a single process."""
