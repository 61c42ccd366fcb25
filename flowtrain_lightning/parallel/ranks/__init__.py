"""The ranks of a job: how they find each other, prove who they are, and form groups."""
