"""Batches of graphs filled up to few sizes, and norms that do not see what fills them: a CUDA graph is of one size."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ssd.distributed.exchange import all_gather
from ssd.runtime.custom_ops import differentiate_once

if TYPE_CHECKING:
    from ..training_run import Run

IGNORED = -100  # the class of a node that is none
_MULTIPLE = 8


class Real(NamedTuple):
    """What rows count for in a mean over those that fill nothing up.

    Attributes:
        share: (rows, 1), one over the number of such rows, of all processes, in each of them, 0 in others.
        unbias: (), what makes a mean of squares about the mean an unbiased variance.
        of_ranks: (ranks, 1), the share of such rows that each process has; None where this one has all.
    """

    share: Tensor
    unbias: Tensor
    of_ranks: Tensor | None

    @classmethod
    def of(cls, rows: Tensor | None, dtype: torch.dtype, alone: bool = True) -> Real | None:
        """rows: (rows, 1) bool, of `find_real`; alone: no other process has rows."""
        if rows is None:
            return None
        counts = (rows.sum() if alone else _gather(rows.sum())).to(dtype)
        count = counts.sum()
        return cls(rows.to(dtype) / count.clamp(min=1), count / (count - 1).clamp(min=1),
                   None if alone else (counts / count.clamp(min=1))[:, None])


def count(batch: dict[str, Tensor]) -> list[int]:
    """What a batch of `graphs.collate` has to have room for: nodes, edges, and nodes of a graph, each at least 1."""
    return [len(batch["x"]) + 1, max(batch["edge_index"].shape[1], 1), int(batch["ptr"].diff().max())]


def fill_up(run: Run, batch: dict[str, Tensor], counts: list[int] | None = None) -> dict[str, Tensor]:
    """A batch of `graphs.collate` with one more graph, of at least a node, which takes nodes and edges to a size of `round_up`.

    Its edges are from its last node to itself. Classes of its nodes are -100. It has no label and no class of its own.
    counts: as `count` has them, those of the batch unless given; of several processes, whose batches are to have one size, the
    largest.

    Returns:
        The batch, and longest (longest, 0), whose length is that of the longest graph, rounded up, or 1 where no mixer asks.
    """
    nodes, edges, longest = (round_up(number, run.buckets) for number in counts or count(batch))
    graphs, longest = len(batch["ptr"]) - 1, longest if run.mixer == "mamba1" else 1
    sizes = {"x": (nodes, 0), "batch": (nodes, graphs), "random_walk_pe": (nodes, 0), "edge_attr": (edges, 0)}
    if run.sizes.data.task == "nodes":
        sizes["y"] = nodes, IGNORED
    filled = {name: _extend(t, *sizes[name]) if name in sizes else t for name, t in batch.items()}
    return filled | {"edge_index": F.pad(batch["edge_index"], (0, edges - batch["edge_index"].shape[1]), value=nodes - 1),
                     "ptr": _extend(batch["ptr"], graphs + 2, nodes), "longest": torch.empty(longest, 0)}


def round_up(count: int, per_doubling: int) -> int:
    """The least size that is no less: `per_doubling` sizes evenly between powers of two, each rounded up to a multiple of 8."""
    power = math.ceil(math.log2(count) * per_doubling - 1e-9)
    return max(-(-math.ceil(2 ** (power / per_doubling)) // _MULTIPLE), -(-count // _MULTIPLE)) * _MULTIPLE


def find_real(batch: dict[str, Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """Which nodes and which edges fill nothing up, (nodes, 1) and (edges, 1) bool; None of a batch that is as it came."""
    if "longest" not in batch:
        return None, None
    nodes = (batch["batch"] < len(batch["ptr"]) - 2)[:, None]
    return nodes, nodes.index_select(0, batch["edge_index"][0])


def count_fill(batch: dict[str, Tensor]) -> float:
    """The share of nodes and edges that fill a batch up."""
    real = torch.cat([t for t in find_real(batch) if t is not None] or [torch.ones(1)])
    return 1 - real.double().mean().item()


def normalise(norm: nn.BatchNorm1d, x: Tensor, real: Real | None) -> Tensor:
    """norm(x) with the statistics of real rows, of all processes if so `real`; of every row where that is None."""
    if real is None or not norm.training:
        return norm(x)
    out, mean, variance = _Normalise.apply(x, norm.weight, norm.bias, real.share, real.of_ranks, norm.eps)
    with torch.no_grad():
        norm.num_batches_tracked.add_(1)
        norm.running_mean.lerp_(mean, norm.momentum)
        norm.running_var.lerp_(variance * real.unbias, norm.momentum)
    return out


class _Normalise(torch.autograd.Function):
    """Batch norm with the statistics of some rows, of all processes. Its backward is its own, of half as many kernels as
    torch's: a step is launches of small ones.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, share: Tensor, of_ranks: Tensor | None,
                eps: float) -> tuple[Tensor, Tensor, Tensor]:
        mean = (x * share).sum(0)
        if of_ranks is None:
            centred = x - mean
            variance = (centred.square() * share).sum(0)
        else:
            mean, variance = _join_moments(x, mean, share, of_ranks)
            centred = x - mean
        rate = (variance + eps).rsqrt()
        scale = weight * rate
        ctx.alone = of_ranks is None
        ctx.save_for_backward(centred, share, rate, scale)
        ctx.mark_non_differentiable(mean, variance)
        return torch.addcmul(bias, centred, scale), mean, variance

    @staticmethod
    @differentiate_once
    def backward(ctx, dout: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        """dx = weight rate (dout - share (sum dout + n sum dout n)), with n = (x - mean) rate, and sums over all processes."""
        centred, share, rate, scale = ctx.saved_tensors
        own = dout.sum(0), (dout * centred).sum(0) * rate
        dbias, dweight = own if ctx.alone else _gather(torch.stack(own)).sum(0)
        return scale * (dout - share * torch.addcmul(dbias, centred, rate * dweight)), own[1], own[0], None, None, None


def _join_moments(x: Tensor, part: Tensor, share: Tensor, of_ranks: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance over all processes' rows by one exchange: of their parts of the mean, and of their variances about
    means of their own. part: this process's of the mean.
    """
    own = part / of_ranks[dist.get_rank()].clamp(min=torch.finfo(of_ranks.dtype).tiny)  # no rows, no part
    parts, variances = _gather(torch.stack([part, ((x - own).square() * share).sum(0)])).unbind(1)
    mean = parts.sum(0)
    apart = parts / of_ranks.clamp(min=torch.finfo(of_ranks.dtype).tiny) - mean
    return mean, (variances + of_ranks * apart.square()).sum(0)


def _gather(t: Tensor) -> Tensor:
    """The tensors of all processes, (ranks, *shape)."""
    every = t.new_empty(dist.get_world_size(), *t.shape)
    all_gather(every.view(-1), t.reshape(-1))
    return every


def _extend(t: Tensor, length: int, value: int) -> Tensor:
    return torch.cat([t, t.new_full((length - len(t), *t.shape[1:]), value)])
