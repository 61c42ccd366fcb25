"""A language model that has learned to read draws, through queries and a diffusion transformer behind it."""
