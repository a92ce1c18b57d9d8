"""Edges of graphs: what nodes have, taken to edges, and what edges have, added up at nodes, one way the other's backward.

Sums run over edges in the order of their nodes, which one sort finds for all layers. Indices that repeat would each be sorted
again, in ten launches, and torch_geometric's scatter adds in an order that changes, and bits with it.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class Ends(NamedTuple):
    """One end of all edges.

    Attributes:
        node: (edges,) int64, the node there.
        order: (edges,) int64, the edges by node.
        counts: (nodes,) int64, how many edges each node has there. Those beyond their sum, in order, are nobody's.
    """

    node: Tensor
    order: Tensor
    counts: Tensor

    @classmethod
    def of(cls, node: Tensor, nodes: int, real: Tensor | None = None) -> "Ends":
        """real: (edges, 1) bool, which fill nothing up; others are at the last node, and nobody's."""
        return cls(node, node.argsort(stable=True), count_edges(node, nodes, real))

    @classmethod
    def of_both(cls, edge_index: Tensor, nodes: int, real: Tensor | None = None) -> "tuple[Ends, Ends]":
        """Where the edges of edge_index, (2, edges), come from and where they go."""
        return cls.of(edge_index[0], nodes, real), cls.of(edge_index[1], nodes, real)

    def take(self, t: Tensor) -> Tensor:
        """(nodes, channels) to (edges, channels): each edge's node's."""
        return _Take.apply(t, *self)

    def add_up(self, t: Tensor) -> Tensor:
        """(edges, channels) to (nodes, channels): the sum over each node's edges."""
        return _AddUp.apply(t, *self)


def count_edges(node: Tensor, nodes: int, real: Tensor | None = None) -> Tensor:
    """(nodes,) int64, how many edges each has at the end that `node` names, of those that are real, as in `Ends.of`."""
    counted = torch.ones_like(node) if real is None else real[:, 0].long()
    return node.new_zeros(nodes).index_add(0, node, counted)  # torch.bincount would wait for the GPU


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t: Tensor, node: Tensor, order: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(node, order, counts)
        return t.index_select(0, node)

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[Tensor | None, ...]:
        return _AddUp.apply(dout, *ctx.saved_tensors), None, None, None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, t: Tensor, node: Tensor, order: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(node, order, counts)
        # segment_reduce adds in the dtype that it is given; unsafe: to check the lengths would be to wait for the GPU
        summands = t.index_select(0, order).to(torch.promote_types(t.dtype, torch.float32))
        return torch.segment_reduce(summands, "sum", lengths=counts, unsafe=True, initial=0).to(t.dtype)

    @staticmethod
    def backward(ctx, dout: Tensor) -> tuple[Tensor | None, ...]:
        return _Take.apply(dout, *ctx.saved_tensors), None, None, None
