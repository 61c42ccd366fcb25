"""Refuses layouts that divide a mixture's experts where the module's cannot be divided, before any of them computes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import nn
from torch.nn.utils import parametrize

from flowtrain_lightning.allocator import Layout
from flowtrain_lightning.module import FlowModule
from flowtrain_lightning.parallel.experts.expert_adapters import adapted_stacks
from flowtrain_lightning.parallel.experts.experts import number_of_experts


def refuse_undividable_experts(layouts: Mapping[str, Layout], module: FlowModule) -> None:
    """Raises where ranks are to share experts that are not there, or that they cannot share.

    Args:
        layouts: role -> its layout.
        module: that trains, with its halves whole; it was checked.

    Raises:
        ValueError: names the experts, and what to do.
    """
    for role, layout in layouts.items():
        if layout.expert_ranks == 1:
            continue
        experts = dict(_experts_of(module, role))
        if not experts and layout.expert > 1:
            raise ValueError(
                f"The {role} has expert {layout.expert}, but {type(module).__name__} has no experts there that ranks "
                "could share: these are the mixtures of Hugging Face that compute from stacked weights (gate_up_proj, "
                "down_proj), and modules of your own that derive from flow.Experts. Leave expert out."
            )
        for path, part in experts.items():
            reason = (
                _why_unadaptable(path, part, module, layout.tensor)
                or _why_undividable(path, part, layout.expert_ranks)
                or _why_skipped(path, module, layout.expert)
                or _why_not_in_stages(path, layout.pipeline)
            )
            if reason is not None:
                raise ValueError(f"The {role} has {_degrees(layout)}, but {reason}")


def _degrees(layout: Layout) -> str:
    """The degrees that divide experts, in words."""
    degrees = {"expert": layout.expert, "tensor": layout.tensor}
    return " and ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1)


def _experts_of(module: FlowModule, role: str) -> Iterator[tuple[str, nn.Module]]:
    """Path and module of the experts of every layer of a half."""
    for half in module.halves[role]:
        for path, part in module.get_submodule(half).named_modules(prefix=half):
            if number_of_experts(part) is not None:
                yield path, part


def _why_undividable(path: str, experts: nn.Module, ranks: int) -> str | None:
    """Why so many ranks cannot share the experts of a layer, as the end of a sentence; None where they can."""
    count = number_of_experts(experts)
    assert count is not None, "they are experts"
    if count % ranks:
        return (
            f"{path!r} has {count} experts, which {ranks} ranks cannot share evenly. Take degrees (expert x tensor) "
            "that divide them."
        )
    if any(map(parametrize.is_parametrized, experts.modules())):
        return (
            f"the weights of {path!r} are parametrized, which ranks that have a share of them cannot compute. Leave "
            "the parametrization out, or these degrees."
        )
    for name, stack in experts.named_parameters():
        if stack.ndim == 0 or len(stack) != count:
            return (
                f"{f'{path}.{name}'!r} has the shape {list(stack.shape)}, which is no stack with an entry for each of "
                f"{count} experts. Move it out of the experts, or leave these degrees out."
            )
    return None


def _why_unadaptable(path: str, experts: nn.Module, module: FlowModule, tensor: int) -> str | None:
    """Why ranks cannot share what adapts the experts of a layer; None where they can."""
    if any(True for _ in adapted_stacks(experts)):
        return (
            f"target_parameters adapts weights of a module within {path!r}, whose adapters are no stacks. Let the "
            "experts themselves have these weights, or leave these degrees out."
        )
    for layer in adapted_stacks(module):
        if layer.get_base_layer() is experts and tensor > 1:
            return (
                f"target_parameters adapts {path!r}, which is not shown to be exact where tensor ranks share experts. "
                "Take expert without tensor, or leave target_parameters out."
            )
        if layer.get_base_layer() is experts and layer.num_experts != number_of_experts(experts):
            return (
                f"{f'{path}.{layer.parameter_name}'!r} has one adapter for all experts: peft makes one for each where "
                "a stack has three dimensions. Take it out of target_parameters, or leave these degrees out."
            )
    return None


def _why_skipped(path: str, module: FlowModule, expert: int) -> str | None:
    """Why ranks would wait for each other at the experts of a layer; None where every rank comes there.

    Tensor ranks have the same samples, so that all of them come there, or none.
    """
    for conditional in module.conditional_modules if expert > 1 else ():
        if f"{path}.".startswith(f"{conditional}."):
            return (
                f"{conditional!r} is run for some samples and not for others: a rank whose samples do not run it would "
                "hang those that wait for its rows. Run it for every sample, if only on no rows, or leave expert out."
            )
    return None


def _why_not_in_stages(path: str, stages: int) -> str | None:
    """Why tensor ranks of a stage cannot share the experts of a layer; None where there are no stages."""
    if stages == 1:
        return None
    return (
        f"{path!r} has experts, which ranks share by data and tensor degrees alone. Leave pipeline out, or all other "
        "degrees but data."
    )
