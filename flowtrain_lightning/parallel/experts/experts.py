"""Experts of a mixture: stacks of weights, each expert of which computes the rows that chose it.

A rank computes with all experts of a layer, or, where a layout divides them among ranks, with its share: rows then go
to the ranks that hold their experts, and the results come back. Every row passes its experts, and none is dropped, so
the results are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from flowtrain_lightning.parallel.experts.expert_adapters import own_stack, stack_paths
from flowtrain_lightning.parallel.experts.expert_counts import COUNTS, ExpertBalance, ExpertCounts, is_balanced
from flowtrain_lightning.parallel.trading import traded

Compute = Callable[[Tensor, Tensor], Tensor]
"""Rows sorted by expert, and where those of each expert end -> results, row by row."""

_COUNT = "number_of_experts"
_EXCHANGE = "expert_exchange"
"""Attributes of a module that is the experts of a layer; the second where a layout has divided them."""


class Experts(nn.Module):
    """The experts of a layer, of a kind of your own. A layout with ``expert`` divides them among ranks.

    Every parameter of the module, and of modules within, is a stack with one entry for each expert:
    ``[count, ...]``. What all tokens pass, such as the router, belongs outside of it::

        class Perceptrons(flow.Experts):
            def __init__(self):
                super().__init__(8)
                self.widen = nn.Parameter(torch.randn(8, 256, 64) / 8)
                self.narrow = nn.Parameter(torch.randn(8, 64, 256) / 16)

            def compute(self, rows, weights, ends):
                wide = grouped_product(rows, weights["widen"], ends)  # flowtrain_lightning.parallel.experts.experts
                return grouped_product(wide.relu(), weights["narrow"], ends)

    A layer calls it with its tokens and what its router chose: ``self.experts(hidden, chosen, shares)``. To keep
    experts equally full without a loss, let `choose` choose.

    Args:
        count: experts.
        balance: by how much the bias of an expert changes at the end of every step, by which `choose` prefers those
            that fewer tokens chose (DeepSeek-V3, arXiv 2412.19437, takes 0.001); 0 is no bias.

    Raises:
        ValueError: ``balance`` is below 0.
    """

    def __init__(self, count: int, balance: float = 0.0) -> None:
        super().__init__()
        if balance < 0:
            raise ValueError(f"balance is {balance}; it must be 0 or more, such as 0.001.")
        mark_experts(self, count)
        self.balance = ExpertBalance(count, balance) if balance > 0 else None

    def choose(self, scores: Tensor, each: int) -> Tensor:
        """Chooses the experts with the highest scores, to which a bias of each is added where ``balance`` is above 0.

        The bias decides who is chosen, and nothing else: experts count what the scores alone say, and a gradient does
        not pass it::

            chosen = self.experts.choose(scores, 2)
            self.experts(hidden, chosen, scores.gather(-1, chosen))

        Args:
            scores: ``[tokens, count]``.
            each: experts of a token.

        Returns:
            ``[tokens, each]`` int64.
        """
        biased = scores.detach() if self.balance is None else self.balance(scores)
        return biased.topk(each, dim=-1).indices

    def compute(self, rows: Tensor, weights: Mapping[str, Tensor], ends: Tensor) -> Tensor:
        """The results of this rank's experts, row by row. It does the same whatever rows there are, if there are none.

        Args:
            rows: ``[rows, width]``, sorted by expert.
            weights: name of a parameter -> this rank's part of the stack, ``[own experts, ...]``. Read these, not the
                parameters; see `grouped_product`.
            ends: ``[own experts]`` int32, where the rows of each expert end.

        Returns:
            ``[rows, width]``.
        """
        raise NotImplementedError(f"{type(self).__name__} must define compute.")

    def forward(self, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """See `compute_chosen`."""
        weights = {path: own_stack(self, path) for path in stack_paths(self)}
        return compute_chosen(self, hidden, chosen, shares, lambda rows, ends: self.compute(rows, weights, ends))


def mark_experts(module: nn.Module, count: int) -> None:
    """Says that a module, which computes by `compute_chosen`, is the experts of a layer.

    Args:
        module: its parameters are stacks, ``[count, ...]``.
        count: experts.
    """
    setattr(module, _COUNT, count)
    setattr(module, COUNTS, ExpertCounts())


def number_of_experts(module: nn.Module) -> int | None:
    """The experts of a module that was marked, on all ranks together; None of other modules."""
    count: int | None = getattr(module, _COUNT, None)
    return count


def counts_of(module: nn.Module) -> ExpertCounts:
    """The counts of the tokens that chose each expert of a module that was marked."""
    counts: ExpertCounts = getattr(module, COUNTS)
    return counts


def exchange_of(module: nn.Module) -> ExpertExchange | None:
    """The exchange of rows with the ranks that hold the experts of a module; None where a rank holds all of them."""
    exchange: ExpertExchange | None = getattr(module, _EXCHANGE, None)
    return exchange


def set_exchange(module: nn.Module, exchange: ExpertExchange) -> None:
    """Says that a rank holds a share of the experts of a module."""
    setattr(module, _EXCHANGE, exchange)


def compute_chosen(
    module: nn.Module,
    hidden: Tensor,
    chosen: Tensor,
    shares: Tensor,
    compute: Compute,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Lets every token pass the experts that it chose.

    Args:
        module: was marked as experts.
        hidden: ``[tokens, width]``.
        chosen: ``[tokens, experts of a token]`` int64, which experts a token passes.
        shares: ``[tokens, experts of a token]`` what each of them counts.
        compute: computes with this rank's experts.
        dtype: in which it begins, so that rows are copied and sent in it; None is that of ``hidden``.

    Returns:
        ``[tokens, width]``, in the dtype of ``hidden``.
    """
    count, each = number_of_experts(module), chosen.shape[1]
    assert count is not None, "it was marked"
    exchange = exchange_of(module)
    if exchange is not None and torch.is_grad_enabled():
        # On every rank, if on one: a backward, or what it computes again, would wait for ranks that leave it out.
        hidden, shares = (each if each.requires_grad else each.detach().requires_grad_() for each in (hidden, shares))
    by_expert, order = chosen.flatten().sort(stable=True)
    ends = torch.searchsorted(by_expert, torch.arange(count, device=chosen.device), right=True, out_int32=True)
    if exchange is not None or is_balanced(module) or not torch.compiler.is_compiling():  # whose graph it breaks
        counts_of(module).note(ends)
    # Each row is picked once, so that backwards add nothing up in an order of their own.
    rows = hidden.to(dtype or hidden.dtype).repeat_interleave(each, dim=0).index_select(0, order)
    results: Tensor = compute(rows, ends) if exchange is None else exchange(rows, ends, compute)
    of_tokens = results.index_select(0, order.argsort()).view(*chosen.shape, results.shape[-1])
    return (of_tokens * shares[..., None]).sum(dim=1, dtype=hidden.dtype)


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Every row times the matrix of its expert, in autocast's dtype where that is on.

    In bfloat16 nothing waits for the device; for other dtypes PyTorch has no such product on all devices, and the
    experts compute one after another.

    Args:
        rows: ``[rows, inputs]``, sorted by expert.
        weights: ``[experts, outputs, inputs]``.
        ends: ``[experts]`` int32, where the rows of each expert end.

    Returns:
        ``[rows, outputs]``.
    """
    dtype = computing_dtype(weights)
    rows, weights = rows.to(dtype), weights.to(dtype)
    if dtype == torch.bfloat16:
        return functional.grouped_mm(rows, weights.transpose(1, 2), offs=ends)
    counts = ends.diff(prepend=ends.new_zeros(1)).tolist()
    parts = zip(torch.split(rows, counts), weights, strict=True)
    return torch.cat([functional.linear(part, weight) for part, weight in parts])


def computing_dtype(weights: Tensor) -> torch.dtype:
    """The dtype in which `grouped_product` computes: autocast, which knows nothing of such products, says it."""
    device = weights.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return weights.dtype


class ExpertExchange:
    """Brings rows to the ranks that hold their experts, and the results back. All ranks of the group call it together.

    Args:
        group: the ranks among which experts are divided, neighbours together: the first has the first experts.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._ranks = dist.get_world_size(group)
        self._rows: Tensor | None = None
        self._dropped = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """Nothing: a copy of a module, such as one whose FLOPs are counted, is one rank's alone."""

    def take_rows(self) -> list[int]:
        """The rows that each expert of this rank has computed in training since the last call; recomputed ones too."""
        rows, self._rows = self._rows, None
        return [] if rows is None else rows.tolist()

    def take_dropped(self) -> int:
        """The rows of this rank that came back from no expert since the last call."""
        dropped, self._dropped = self._dropped, 0
        return dropped

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def __call__(self, rows: Tensor, ends: Tensor, compute: Compute) -> Tensor:
        """The results of all experts for this rank's rows.

        Args:
            rows: ``[rows, width]``, sorted by expert.
            ends: ``[experts]`` int32, where the rows of each expert end.
            compute: computes with this rank's experts.

        Returns:
            ``[rows, width]``.

        Raises:
            torch.OutOfMemoryError: on the device, which says how many rows came.
        """
        counts = ends.diff(prepend=ends.new_zeros(1)).view(self._ranks, -1)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts, group=self._group)
        sent, received = torch.stack([counts.sum(dim=1), theirs.sum(dim=1)]).tolist()
        own = torch.arange(theirs.shape[1], device=rows.device).repeat(self._ranks)
        order = own.repeat_interleave(theirs.flatten(), output_size=sum(received)).argsort(stable=True)
        of_experts = theirs.sum(dim=0)
        if torch.is_grad_enabled():
            self._rows = of_experts if self._rows is None else self._rows + of_experts
        with _saying_how_full(sum(sent), sum(received)):
            came = traded(rows, sent, received, self._group)  # by rank, then by expert
            results = compute(came.index_select(0, order), of_experts.cumsum(dim=0).int())
            returned = traded(results.index_select(0, order.argsort()), received, sent, self._group)
        self._dropped += len(rows) - len(returned)
        return returned


@contextmanager
def _saying_how_full(sent: int, received: int) -> Iterator[None]:
    """Inside, an error of memory says how many rows a rank's experts got, beside those that it sent to all."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise torch.OutOfMemoryError(
            f"This rank's experts of a layer ran out of memory: {received:,} rows chose them, where the rank sent "
            f"{sent:,} rows to all experts, about as many as each rank gets if experts are equally full. None is "
            "dropped. Keep experts equally full (flow.Experts(balance=...)), or take a smaller token_budget, "
            f"recompute, or more expert ranks. {error}"
        ) from error
