"""From a step's plan to the batches of a rank: read, packed, and brought by workers."""
