"""Measurements of speed, each beside its peers in one run. Start with `train.py`."""
