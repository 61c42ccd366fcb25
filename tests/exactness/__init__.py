"""Every layout gives the gradients of one process that trains the same module."""
