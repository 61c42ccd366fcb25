"""Layers that draw random numbers while they train."""

from __future__ import annotations

from torch import nn

_DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def dropout_settings(layer: nn.Module) -> list[str]:
    """The attributes of a layer that are a probability of dropout above 0, as layers name them."""
    if isinstance(layer, _DROPOUT):
        return ["p"] if layer.p > 0 else []
    return [name for name, value in vars(layer).items() if "dropout" in name and type(value) is float and value > 0]
