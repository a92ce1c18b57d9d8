"""Batches of graphs filled up to few sizes, and norms that do not see what fills them: a CUDA graph is of one size."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from ..training_run import Run

IGNORED = -100  # the class of a node that is none
_MULTIPLE = 8


def fill_up(run: Run, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """A batch of `graphs.collate` with one more graph, of at least a node, which takes nodes and edges to a size of `round_up`.

    Its edges are from its last node to itself. Classes of its nodes are -100. It has no label and no class of its own.

    Returns:
        The batch, and longest (longest, 0), whose length is that of the longest graph, rounded up, or 1 where no mixer asks.
    """
    nodes, edges = (round_up(max(count, 1), run.buckets) for count in (len(batch["x"]) + 1, batch["edge_index"].shape[1]))
    graphs = len(batch["ptr"]) - 1
    longest = round_up(int(batch["ptr"].diff().max()), run.buckets) if run.mixer == "mamba1" else 1
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


def normalise(norm: nn.BatchNorm1d, x: Tensor, real: Tensor | None) -> Tensor:
    """norm(x) with the statistics of real rows, (rows, 1); of every row where that is None."""
    if real is None or not norm.training:
        return norm(x)
    count = real.sum()
    mean = (x * real).sum(0) / count.clamp(min=1)
    variance = ((x - mean) * real).square().sum(0) / count.clamp(min=1)
    with torch.no_grad():
        norm.num_batches_tracked.add_(1)
        norm.running_mean.lerp_(mean.to(norm.running_mean), norm.momentum)
        norm.running_var.lerp_((variance * (count / (count - 1).clamp(min=1))).to(norm.running_var), norm.momentum)
    return (x - mean) * (norm.weight * (variance + norm.eps).rsqrt()) + norm.bias


def _extend(t: Tensor, length: int, value: int) -> Tensor:
    return torch.cat([t, t.new_full((length - len(t), *t.shape[1:]), value)])
