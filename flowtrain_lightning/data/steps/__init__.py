"""Which samples are in each step, and how they are packed."""
