"""Context parallelism by Ulysses: ranks share every sequence, and trade tokens for heads around attention.

Outside of attention a rank computes on its slice of a microbatch's tokens. Before attention all slices are exchanged
for all tokens of its share of the heads, and back behind it, so that the kernel sees whole sequences: DeepSpeed-Ulysses
(arXiv 2309.14509).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from flowtrain_lightning.attention import Kernel, attending_by
from flowtrain_lightning.parallel.engine import HalfEngine, StepRecord
from flowtrain_lightning.parallel.gradients import local_part, squared_norms
from flowtrain_lightning.parallel.ranks.random_streams import part_stream
from flowtrain_lightning.parallel.tensor_parallel import TensorParallelHalf
from flowtrain_lightning.parallel.trading import traded


class ContextParallelHalf:
    """A half whose sequences are shared by context ranks, each of which holds the same weights; see `HalfEngine`.

    Args:
        across: sums gradients over data-parallel and context ranks alike: each has a summand.
        group: the context ranks.
        names: path -> parameter of the half, for messages.
        sums_in_backward: ``across`` sums gradients in every backward, as FSDP2 does, and not once a step.

    Attributes:
        names: as given.
        exchange: of heads for tokens.
    """

    in_lockstep = True

    def __init__(
        self,
        across: HalfEngine,
        group: dist.ProcessGroup,
        names: Mapping[str, nn.Parameter],
        *,
        sums_in_backward: bool,
    ) -> None:
        self.parameters = across.parameters
        self.names = names
        self.exchange = HeadExchange(group)
        self._across = across
        self._sums_in_backward = sums_in_backward

    def begin_run(self) -> None:
        """Lets the first steps from now on compare what ranks hold alike."""
        if isinstance(self._across, TensorParallelHalf):
            self._across.begin_run()

    @property
    def record(self) -> StepRecord:
        """As of the layout of the data-parallel ranks: ranks of this one see the same samples."""
        return self._across.record

    @property
    def trains(self) -> bool:
        """Whether any parameter wants a gradient."""
        return self._across.trains

    def begin_step(self) -> None:
        """Before the first forward of a step that trains."""
        self._across.begin_step()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Runs one forward, in which `shared_tokens` shares a microbatch."""
        with _offering(self.exchange):
            result = self._across.call(function, *args)
        for output in result if isinstance(result, tuple) else (result,):
            if isinstance(output, Tensor) and output.requires_grad:  # others may be shared before its backward
                output.register_hook(self.exchange.resuming())  # type: ignore[no-untyped-call]
        return result

    @contextmanager
    def backward(self, *, last: bool) -> Iterator[None]:
        """Inside, one backward runs, of a microbatch that was shared."""
        with self._across.backward(last=last), attending_by(self.exchange):  # what is computed again attends again
            yield

    @contextmanager
    def on_trial(self) -> Iterator[None]:
        """Inside, forwards and backwards are tried before the first microbatch of a step; their gradients are lost."""
        try:
            yield
        finally:
            for parameter in self.parameters:
                parameter.grad = None
            self._across.begin_step()

    def trial(self, forward: Callable[[], Tensor], factor: float, *, whole: bool) -> Tensor:
        """One forward and its backward on trial, of a microbatch that is shared, or ``whole`` on every context rank.

        Args:
            forward: gives the loss.
            factor: by which its gradients are multiplied.
            whole: nothing is shared.

        Returns:
            the loss.
        """
        with nullcontext() if whole else _offering(self.exchange):
            loss: Tensor = self._across.call(forward)
        around = nullcontext() if whole else attending_by(self.exchange)
        kind = loss.device.type
        precise = torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()
        with self._across.backward(last=self._sums_in_backward), around, precise:
            if loss.requires_grad:
                loss.backward(torch.full_like(loss, factor))  # type: ignore[no-untyped-call]
        return loss.detach()

    def trial_norms(self) -> Tensor:
        """``[parameters]``: norms of what a trial has left of gradients that are equal on all context ranks."""
        share = 1 if self._sums_in_backward else self.exchange.ranks
        return share * squared_norms(self.parameters).sqrt()

    def summed_trial_norms(self) -> Tensor:
        """``[parameters]``: norms of what a trial has left, of which every context rank has a summand."""
        for parameter in self.parameters if not self._sums_in_backward else ():
            if parameter.requires_grad:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                part = local_part(parameter.grad)
                total = part.contiguous()
                dist.all_reduce(total, group=self.exchange.group)
                part.copy_(total)
        if isinstance(self._across, TensorParallelHalf):
            self._across.sum_shares()
        return squared_norms(self.parameters).sqrt()

    def send_gradients(self) -> None:
        """After the step's last backward on this rank."""
        self._across.send_gradients()

    def finish_gradients(self, scale: float) -> None:
        """After the step's last backward."""
        self._across.finish_gradients(scale)

    def squared_norm(self, gradients: list[Tensor]) -> Tensor:
        """The squared 2-norm of these gradients over all ranks of the role."""
        return self._across.squared_norm(gradients)


def slices_of(tokens: int, ranks: int) -> list[int]:
    """Tokens of each of so many context ranks; their numbers differ by one at most."""
    each, more = divmod(tokens, ranks)
    return [each + (rank < more) for rank in range(ranks)]


class HeadExchange:
    """Attention of context ranks: every rank gives its tokens away and gets all tokens of its share of the heads.

    Args:
        group: the context ranks.

    Attributes:
        group: as given.
        ranks: how many these are.
        rank: which of them this one is.
        calls: how often attention came here.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.ranks, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.calls = 0
        self._lengths = [0] * self.ranks

    def share(self, tokens: int) -> slice:
        """The slice of so many tokens on which this rank computes from now on; lengths differ by one at most."""
        self._lengths = slices_of(tokens, self.ranks)
        ends = list(accumulate(self._lengths))
        return slice(ends[self.rank] - self._lengths[self.rank], ends[self.rank])

    def resuming(self) -> Callable[[Tensor], None]:
        """A hook of a gradient: from it on ranks share the microbatch again that they do now."""
        lengths = self._lengths

        def resume(_: Tensor) -> None:
            self._lengths = lengths

        return resume

    @property
    def own_tokens(self) -> int:
        """How many tokens this rank has of the microbatch that was shared last."""
        return self._lengths[self.rank]

    def gathered(self, own: Tensor, tokens: int) -> Tensor:
        """``[own tokens, ...]`` -> ``[tokens, ...]``: the rows of all context ranks, without a gradient."""
        lengths = slices_of(tokens, self.ranks)
        given = own.detach().repeat(self.ranks, *[1] * (own.ndim - 1))
        return traded(given, [len(own)] * self.ranks, lengths, self.group)

    def __call__(self, kernel: Kernel, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention of this rank's tokens, ``[own tokens, heads, head_dim]``.

        Args:
            kernel: attends within whole sequences.
            query: ``[own tokens, heads, head_dim]``.
            key: ``[own tokens, key_heads, head_dim]``; heads are repeated where there are too few for all ranks.
            value: as ``key``.

        Raises:
            ValueError: there are other tokens than this rank's, or heads that cannot be shared evenly.
        """
        self.calls += 1
        heads, key_heads = query.shape[1], key.shape[1]
        if query.shape[0] != self._lengths[self.rank]:
            raise ValueError(
                f"Attention got {query.shape[0]} tokens on a context rank that computes on "
                f"{self._lengths[self.rank]} of them. `slice_tokens` must cut all that the backbone gets token by "
                "token, and nothing else may be added."
            )
        if heads % self.ranks:
            raise ValueError(
                f"{heads} attention heads cannot be shared by {self.ranks} context ranks evenly; take a context "
                "degree that divides them."
            )
        repeats = self.ranks // gcd(key_heads, self.ranks)
        if heads // key_heads % repeats:
            repeats = heads // key_heads
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
        attended = kernel(*(self._to_heads(each) for each in (query, key, value)))
        return self._to_tokens(attended)

    def _to_heads(self, own: Tensor) -> Tensor:
        """``[own tokens, heads, size]`` -> ``[all tokens, own heads, size]``."""
        tokens, heads, size = own.shape
        by_rank = own.view(tokens, self.ranks, heads // self.ranks, size).transpose(0, 1).flatten(0, 1)
        return traded(by_rank, [tokens] * self.ranks, self._lengths, self.group)

    def _to_tokens(self, own: Tensor) -> Tensor:
        """``[all tokens, own heads, size]`` -> ``[own tokens, heads, size]``."""
        tokens = self._lengths[self.rank]
        by_rank = traded(own, self._lengths, [tokens] * self.ranks, self.group)
        return by_rank.view(self.ranks, tokens, *own.shape[1:]).transpose(0, 1).flatten(1, 2)


_offered: HeadExchange | None = None


@contextmanager
def _offering(exchange: HeadExchange) -> Iterator[None]:
    global _offered
    former, _offered = _offered, exchange
    try:
        yield
    finally:
        _offered = former


@contextmanager
def shared_tokens(tokens: int) -> Iterator[slice | None]:
    """Inside, attention is that of context ranks, if the half is in such a layout.

    Args:
        tokens: of the microbatch.

    Yields:
        those on which this rank computes; None where it computes on all.
    """
    if _offered is None:
        yield None
        return
    own = _offered.share(tokens)
    with attending_by(_offered):
        yield own


def draw_for_own_tokens() -> None:
    """From here on each context rank draws masks of its own: they are for other tokens than those of the others."""
    assert _offered is not None, "ranks share a microbatch"
    part_stream(_offered.rank)


@contextmanager
def noting_heads(found: set[int]) -> Iterator[None]:
    """Inside, the number of heads with which attention is called is added to ``found``."""

    def attend(kernel: Kernel, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        found.add(query.shape[1])
        return kernel(query, key, value)

    with attending_by(attend):
        yield


def with_summed_gradients(
    features: Mapping[str, Tensor | tuple[Tensor, ...]],
) -> dict[str, Tensor | tuple[Tensor, ...]]:
    """Features whose gradients will be the sums over the context ranks, since each uses some of the rows."""

    def summed(tensor: Tensor) -> Tensor:
        if _offered is None or not tensor.requires_grad:
            return tensor
        same: Tensor = _SummedGradient.apply(tensor, _offered.group)  # type: ignore[no-untyped-call]
        return same

    return {
        modality: tuple(map(summed, given)) if isinstance(given, tuple) else summed(given)
        for modality, given in features.items()
    }


class _SummedGradient(torch.autograd.Function):
    """Does nothing, and sums the gradient over a group."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: dist.ProcessGroup) -> Tensor:  # type: ignore[override]
        """The tensor."""
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The sum of all ranks' gradients."""
        total = gradients[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None
