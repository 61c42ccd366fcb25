"""A small diffusion transformer draws what queries read in the quickstart's frozen model; see README.md."""
