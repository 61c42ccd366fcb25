"""Lets norms and gated perceptrons of a Hugging Face model run as one kernel each, by the package of Liger, on GPUs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from types import MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

Kernels = Literal["none", "liger"]

_WIDTH, _INNER = 8, 6
_PERCEPTRON = {"gate_proj": (_INNER, _WIDTH), "up_proj": (_INNER, _WIDTH), "down_proj": (_WIDTH, _INNER)}


def refuse_unknown_kernels(kernels: object, compile: str) -> None:
    """Raises for what `use_kernels` does not take, and where it could not do it.

    Raises:
        ValueError: says what it takes, what is to be installed, or what else was given.
    """
    if kernels not in ("none", "liger"):
        raise ValueError(
            f"kernels={kernels!r} was given. Take 'liger' (norms and gated perceptrons as one kernel each, on GPUs) or "
            "'none' (as the model has them)."
        )
    if kernels == "liger" and compile != "none":
        raise ValueError("kernels='liger' was given with compile='blocks', which fuses the same operations; take one.")
    if kernels == "liger" and find_spec("liger_kernel") is None:
        raise ValueError(
            "kernels='liger' was given, but there is no package liger-kernel. Install it with `pip install "
            "liger-kernel`, or leave kernels out."
        )


def use_kernels(model: nn.Module) -> list[str]:
    """Gives modules that compute what Liger's kernels compute these kernels, on GPUs; elsewhere they run as before.

    These are norms by the root mean square and perceptrons gated by SiLU, in Llama's form. Whether a module has this
    form is tried, once per class and with small weights, so that one that only looks like it stays as it is. Names of
    weights stay too.

    Returns:
        The names of the modules that changed.
    """
    forwards: dict[type[nn.Module], Callable[..., Tensor] | None] = {}
    changed = []
    for name, module in model.named_modules():
        if type(module) not in forwards:
            forwards[type(module)] = _kernel_of(module)
        if (forward := forwards[type(module)]) is not None:
            module.forward = MethodType(forward, module)  # type: ignore[method-assign]
            changed.append(name)
    return changed


def _kernel_of(module: nn.Module) -> Callable[..., Tensor] | None:
    """The forward by a kernel that computes what the module does; None where there is none."""
    given = _spread(3, _WIDTH)
    weights = {name for name, _ in module.named_parameters()}
    if weights == {"weight"} and hasattr(module, "variance_epsilon"):
        weight, epsilon = given[0] + 2, float(module.variance_epsilon)  # type: ignore[arg-type]
        normed = given * torch.rsqrt(given.square().mean(-1, keepdim=True) + epsilon)
        return _normalise if _computes(module, {"weight": weight}, given, weight * normed) else None
    names = {f"{name}.weight" for name in _PERCEPTRON}
    if weights in (names, names | {f"{name}.bias" for name in _PERCEPTRON}):
        values = {f"{name}.weight": _spread(*shape) for name, shape in _PERCEPTRON.items()}
        values |= {f"{name}.bias": _spread(shape[0]) for name, shape in _PERCEPTRON.items() if weights != names}

        def product(name: str, rows: Tensor) -> Tensor:
            return nn.functional.linear(rows, values[f"{name}.weight"], values.get(f"{name}.bias"))

        gated = nn.functional.silu(product("gate_proj", given)) * product("up_proj", given)
        return _gate if _computes(module, values, given, product("down_proj", gated)) else None
    return None


def _spread(*shape: int) -> Tensor:
    """Numbers that differ, without drawing any: a module's weights are drawn from the same stream."""
    return torch.linspace(-0.7, 1.3, math.prod(shape), device="cpu", dtype=torch.float32).reshape(shape)


def _computes(module: nn.Module, weights: Mapping[str, Tensor], given: Tensor, expected: Tensor) -> bool:
    try:
        found = functional_call(module, dict(weights), (given,))
    except (TypeError, ValueError, RuntimeError, AttributeError):  # it takes something else
        return False
    return isinstance(found, Tensor) and found.shape == expected.shape and torch.allclose(found, expected, atol=1e-5)


def _normalise(module: Any, hidden: Tensor) -> Tensor:
    if not _takes(hidden):
        result: Tensor = type(module).forward(module, hidden)
        return result
    from liger_kernel.ops import LigerRMSNormFunction  # type: ignore[import-not-found]

    # Not in place: the gradient that comes in may be that of the residual too.
    normed: Tensor = LigerRMSNormFunction.apply(hidden, module.weight, module.variance_epsilon, 0.0, "llama", False)
    return normed


def _gate(module: Any, hidden: Tensor) -> Tensor:
    if not _takes(hidden):
        result: Tensor = type(module).forward(module, hidden)
        return result
    from liger_kernel.ops import LigerSiLUMulFunction

    down: Tensor = module.down_proj(LigerSiLUMulFunction.apply(module.gate_proj(hidden), module.up_proj(hidden)))
    return down


def _takes(hidden: Tensor) -> bool:
    """Whether the kernels take a tensor: plain ones on GPUs."""
    return hidden.is_cuda and type(hidden) in (Tensor, nn.Parameter)
