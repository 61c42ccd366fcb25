"""Pool: one address space for features and gradients, moved between processes."""
