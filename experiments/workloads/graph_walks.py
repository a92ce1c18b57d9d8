"""Tokens of a node's neighbourhood, by random walks from it, as Graph Mamba Networks (arXiv:2402.08678) have them."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .graph_edges import count_edges
from .graph_mixers import Bidirectional, Sequences
from .graph_padding import Real, normalise


class WalkEncoder(nn.Module):
    """A node's features to a state of its neighbourhood: a bidirectional mixer over walks' means, the longest walks first.

    Args:
        d_model: channels.
        make: a mixer, see `graph_mixers`.
    """

    def __init__(self, d_model: int, make: Callable[[], nn.Module]):
        super().__init__()
        self.mixer, self.norm = Bidirectional(make), nn.BatchNorm1d(d_model)

    def forward(self, h: Tensor, walks: Tensor, real: Real | None = None) -> Tensor:
        """h: (nodes, d_model), to the same; walks: as `random_walks` has them; real: of nodes."""
        tokens = walk_tokens(h, walks)
        nodes, length, _ = tokens.shape
        mixed = self.mixer(tokens.flatten(0, 1), Sequences.make_alike(nodes, length, h.device))
        return normalise(self.norm, h + mixed.unflatten(0, (nodes, length))[:, -1], real)


def walk_tokens(h: Tensor, walks: Tensor) -> Tensor:
    """The mean features of the nodes on walks of each length, a node counted as often as it is visited.

    Args:
        h: (nodes, d_model).
        walks: (hops + 1, nodes, walks), of which those of m steps are the beginnings.

    Returns:
        (nodes, hops + 1, d_model), of the longest walks first; the last is the node itself.
    """
    total, tokens = h, [h]
    for step, visited in enumerate(walks[1:], start=1):
        total = total + h[visited].mean(1)
        tokens.append(total / (step + 1))
    return torch.stack(tokens[::-1], 1)


def random_walks(edge_index: Tensor, nodes: int, walks: int, hops: int) -> Tensor:
    """Walks from every node along edges, drawn by torch's generator; a node that no edge leaves keeps its walks.

    Args:
        edge_index: (2, edges), from where to where.
        nodes, walks, hops: how many nodes there are, walks of each, and steps of a walk.

    Returns:
        (hops + 1, nodes, walks) int64, the node after each step.
    """
    itself = torch.arange(nodes, device=edge_index.device)
    degree = count_edges(edge_index[0], nodes)
    by_source = torch.cat([edge_index[0], itself]).argsort(stable=True)
    ends = torch.cat([edge_index[1], itself])[by_source]  # of each node's edges, then the node itself
    first = (degree + 1).cumsum(0) - degree - 1
    path = [itself[:, None].expand(-1, walks)]
    for _ in range(hops):
        choices = degree[path[-1]].clamp(min=1)
        chosen = (torch.rand(choices.shape, device=choices.device) * choices).long()
        path.append(ends[first[path[-1]] + chosen.minimum(choices - 1)])  # a product may be rounded up
    return torch.stack(path)
