"""Finds what makes a module fit on the devices that there are, before more of them are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil, log2

from flowtrain_lightning.allocator import BACKBONE, PlanningError
from flowtrain_lightning.cli.plan_question import PlanQuestion

_ADAPTERS = 16
"""Rank of the adapters that are tried."""


def remedies(question: PlanQuestion) -> list[str]:
    """Options of ``flowtrain plan`` with which training runs a plan that fits; each is enough.

    What changes nothing about the result comes first. A smaller budget is added to the others where they need it.
    """
    found = []
    if (budget := _fitting_budget(question)) is not None:
        found.append(f"--token-budget {budget}")
    if (patches := _fitting_encoder_budget(question)) is not None:
        found.append(f"--encoder-budget {patches}")
    if question.keeps_as_asked and question.workload.encoder_activations > 1:
        found += ["--encoder-activations 1"] * bool(question.with_encoder_activations(1).running)
    for words, changed in _changed(question):
        if changed.fits:
            found.append(words)
        elif budget is None is patches and (less := _fitting_budget(changed)) is not None:
            found.append(f"{words} --token-budget {less}")
    return found


def refusal(question: PlanQuestion) -> str:
    """Why there is no plan and what would do, as sentences: what the devices at hand can do before more of them."""
    costs = question.costs
    smallest, offers = costs.smallest_cluster(), remedies(question)
    more = "" if smallest is None else f"the smallest number that would do is {smallest}"
    if offers:
        first = f"{costs.why_nothing_fits}. On these it fits with {_either(offers)}"
        return f"{first}; without any of this {more}." if more else f"{first}."
    return f"{costs.why_nothing_fits}; {more or 'nor would any number of them do'}."


def _changed(question: PlanQuestion) -> Iterator[tuple[str, PlanQuestion]]:
    """The options that change something, with the question that they make."""
    space = question.space
    if space.offload == "none":
        yield "--offload-activations", replace(question, space=replace(space, offload="activations"))
    module = question.module
    if module.backbone.trains and not any(part.adapters for part in module.backbone.layers):
        precision = replace(question.precision, frozen=2)
        adapted = replace(question, module=module.with_adapters(_ADAPTERS), precision=precision)
        yield f"--lora {_ADAPTERS} --frozen-bf16", adapted
    for half in ("encoder", BACKBONE):
        try:
            frozen = module.with_frozen(half)
        except PlanningError:  # it has no such half, or nothing else would train
            continue
        if frozen.roles != module.roles:
            yield f"--freeze {half}", replace(question, module=frozen)


def _fitting_budget(question: PlanQuestion) -> int | None:
    """The largest of the smaller token budgets, by halves, with which training runs something that fits."""
    tried = _halves(question.workload.token_budget, question.least_budget)
    return next((budget for budget in tried if question.with_budget(budget).fits), None)


def _fitting_encoder_budget(question: PlanQuestion) -> int | None:
    """The same of encoder batches, whose least budget is that of the longest media item."""
    if (least := question.least_encoder_budget) is None:
        return None
    tried = _halves(question.workload.encoder_budget, least)
    return next((patches for patches in tried if question.with_encoder_budget(patches).fits), None)


def _halves(usual: int, least: int) -> list[int]:
    """Half of a budget, a quarter and so on, and in the end the least one that there is."""
    found = [usual // 2**power for power in range(1, 1 + ceil(log2(max(2, usual / least))))]
    return [*(budget for budget in found if budget > least), *([least] if least < usual else [])]


def _either(words: list[str]) -> str:
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
