"""The pool's device tier: entries of tensors on a GPU stay in GPU memory, and readers see them there."""
