"""Exchanges between the rows of a step."""

from __future__ import annotations

import numpy as np

from flowtrain_lightning.packing.exchange import exchange_media


def test_an_exchange_never_overfills_a_microbatch():
    # The two texts that could take the picture's place are longer than it, and their microbatch's room is spent.
    tokens = np.array([300, 100, 160, 160, 80])
    bin_of = np.array([0, 0, 1, 1, 1])
    encoder = np.array([300.0, 0.0, 0.0, 0.0, 0.0])
    exchange_media(bin_of, np.array([0, 1]), np.array([1, 4, 2, 3, 0]), tokens, encoder, np.ones((2, 1)), 1, 400, 400)
    assert np.bincount(bin_of, tokens, minlength=2).max() <= 400
