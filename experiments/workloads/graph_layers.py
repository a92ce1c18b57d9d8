"""Graph-Mamba's layer (arXiv:2402.00789): messages between neighbours beside a sequence model over nodes ordered by degree."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from .graph_edges import Ends, count_edges
from .graph_mixers import Sequences
from .graph_padding import Real, normalise

Reals = tuple[Real | None, Real | None]  # of nodes and of edges


class GatedGCN(nn.Module):
    """Message passing with a gate for each edge (arXiv:1711.07553, with edges' features as arXiv:2003.00982 has them).

    An edge from j to i with features e has the gate sigma(D h_i + E h_j + C e); node i adds to A h_i the mean of its B h_j
    weighted by the gates.

    Args:
        d_model: channels of nodes and of edges.
    """

    def __init__(self, d_model: int):
        super().__init__()
        self.of_nodes = nn.Linear(d_model, 4 * d_model)  # A, D, B, E
        self.of_edges = nn.Linear(d_model, d_model)  # C
        self.norm_nodes, self.norm_edges = nn.BatchNorm1d(d_model), nn.BatchNorm1d(d_model)

    def forward(self, h: Tensor, e: Tensor, edges: tuple[Ends, Ends], real: Reals = (None, None)) -> tuple[Tensor, Tensor]:
        """h: (nodes, d_model), e: (edges, d_model), edges: from where to where; to h and e after it."""
        source, target = edges
        d_model = h.shape[1]
        own, at_target, at_source = self.of_nodes(h).split([d_model, d_model, 2 * d_model], 1)
        value, from_source = source.take(at_source).chunk(2, 1)
        gate = (target.take(at_target) + from_source + self.of_edges(e)).to(h.dtype)  # autocast's is too coarse to sum in
        weight = gate.sigmoid()
        weighted, total = target.add_up(torch.cat([weight * value, weight], 1)).chunk(2, 1)
        h = h + normalise(self.norm_nodes, own + weighted / (total + 1e-6), real[0]).relu()
        return h, e + normalise(self.norm_edges, gate, real[1]).relu()


class GraphMambaLayer(nn.Module):
    """Both branches from the same nodes, each residual with a norm; their sum goes through a residual FFN with a norm.

    Args:
        d_model: channels of nodes and of edges.
        mixer: (row, sequences) to the row mixed, see `graph_mixers`.
    """

    def __init__(self, d_model: int, mixer: nn.Module):
        super().__init__()
        self.messages, self.mixer = GatedGCN(d_model), mixer
        self.norm_messages, self.norm_mixer, self.norm_out = (nn.BatchNorm1d(d_model) for _ in range(3))
        self.ffn = nn.Sequential(nn.Linear(d_model, 2 * d_model), nn.ReLU(), nn.Linear(2 * d_model, d_model))

    def forward(self, h: Tensor, e: Tensor, edges: tuple[Ends, Ends], graphs: Sequences, orders: Tensor,
                real: Reals = (None, None)) -> tuple[Tensor, Tensor]:
        """Args:
            h, e, edges, real: as `GatedGCN.forward` has them.
            graphs: of the nodes.
            orders: (permutations, nodes), of `degree_orders`; the mixer's results are their mean.

        Returns:
            h and e after the layer.
        """
        mixed = torch.stack([mix_in_order(self.mixer, h, graphs, order) for order in orders]).mean(0)
        local, e = self.messages(h, e, edges, real)
        h = normalise(self.norm_messages, local, real[0]) + normalise(self.norm_mixer, h + mixed, real[0])
        return normalise(self.norm_out, h + self.ffn(h), real[0]), e


def degree_orders(edge_index: Tensor, number: Tensor, noise: Tensor) -> Tensor:
    """Permutations of nodes that leave graphs one after another and order each by degree plus noise, high degree last.

    Args:
        edge_index: (2, edges); a node's degree is the number of edges that start there.
        number: (nodes,) int64, each node's graph, which rises.
        noise: (..., nodes), of U[0, 1).

    Returns:
        The shape of noise, int64: the node that comes first, the second, ...
    """
    degree = count_edges(edge_index[0], len(number))
    most = edge_index.shape[1] + 1
    return (number * most + degree + noise.double()).argsort(-1)  # exact in fp64, which has room for all three


def mix_in_order(mixer: nn.Module, h: Tensor, graphs: Sequences, order: Tensor) -> Tensor:
    """The mixer's results for nodes that come to it in that order, each at its node's place."""
    mixed = mixer(h.index_select(0, order), graphs)
    return torch.empty_like(mixed).index_copy(0, order, mixed)


@contextmanager
def keep_statistics(module: nn.Module) -> Iterator[None]:
    """Batch norms within do not count what they see: a layer that is computed again has counted it."""
    norms = {each: (each.momentum, each.num_batches_tracked) for each in module.modules()
             if isinstance(each, nn.modules.batchnorm._BatchNorm)}  # SyncBatchNorm is no BatchNorm1d, and asks for a number
    for norm, (_, number) in norms.items():
        norm.momentum, norm.num_batches_tracked = 0.0, number.clone()
    try:
        yield
    finally:
        for norm, kept in norms.items():
            norm.momentum, norm.num_batches_tracked = kept
