"""The rest of the seam to Lightning: what is refused, how ranks start, how they stop and log together."""
