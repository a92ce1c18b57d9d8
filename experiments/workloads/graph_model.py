"""The model of graphs: encoders, Graph-Mamba layers, a head for graphs or nodes; and its losses."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .graph_edges import Ends
from .graph_layers import GraphMambaLayer, degree_orders, keep_statistics
from .graph_mixers import Bidirectional, Mamba1, PackedMamba2, Sequences
from .graph_padding import Real, find_real, normalise
from .graph_walks import WalkEncoder, random_walks
from .graphs import GraphData

NODES, WALKS = "nodes", "walks"
_PERMUTATIONS = 5  # whose mean a model in eval mode takes


@dataclass(frozen=True)
class GraphSizes:
    """Attributes:
        data: what graphs are.
        d_model, layers: channels of nodes and edges, and how many layers.
        headdim, chunk_size: of Mamba-2.
        d_state: of either mixer.
        pooling: "mean" or "max", of a graph's nodes.
        head_layers: linear layers of the head.
        tokens: "nodes", as arXiv:2402.00789; or "walks", as arXiv:2402.08678: then nodes start as states of their
            neighbourhoods, and mixers are bidirectional.
        walks, hops: of a node, and the steps of each, where tokens are walks.
        mixer: "mamba1" or "ssd".
    """

    data: GraphData
    d_model: int
    layers: int
    headdim: int
    chunk_size: int = 64
    d_state: int = 16
    pooling: str = "mean"
    head_layers: int = 1
    tokens: str = NODES
    walks: int = 4
    hops: int = 4
    mixer: str = "mamba1"


class GraphModel(nn.Module):
    """A batch of graphs to logits of each graph, or of each node.

    Args:
        sizes: of the model.
        variant: of the SSD, see `ssd.ssd_chunk_scan`, or of Mamba-1's scan, see `mamba1.choose_scan`.
        checkpoint_activations: the backward computes each layer, and the states of neighbourhoods, again from nodes and edges,
            which alone are kept.
    """

    def __init__(self, sizes: GraphSizes, variant: str = "auto", checkpoint_activations: bool = False):
        super().__init__()
        self.sizes, self.checkpoint_activations = sizes, checkpoint_activations
        data, d_model = sizes.data, sizes.d_model
        make = partial(_mixer, sizes, variant)
        self.of_nodes, self.of_edges = _encoder(data.node_features, d_model), _encoder(data.edge_features, d_model)
        self.of_positions = _encoder(data.pe_steps, d_model) if data.pe_steps else None
        self.of_walks = WalkEncoder(d_model, make) if sizes.tokens == WALKS else None
        self.layers = nn.ModuleList(GraphMambaLayer(d_model, Bidirectional(make) if sizes.tokens == WALKS else make())
                                    for _ in range(sizes.layers))
        # the last one's edges go nowhere, as published: a gradient of theirs is what DistributedDataParallel would wait for
        self.layers[-1].messages.norm_edges.requires_grad_(False)
        hidden = [layer for _ in range(sizes.head_layers - 1) for layer in (nn.Linear(d_model, d_model), nn.ReLU())]
        self.head = nn.Sequential(*hidden, nn.Linear(d_model, data.outputs))

    def forward(self, batch: dict[str, Tensor], noise: Tensor | None = None, walks: Tensor | None = None) -> Tensor:
        """Args:
            batch: as `graphs.collate` makes it, or `graph_padding.fill_up`.
            noise: (layers, permutations, nodes), of U[0, 1), for the orders of nodes; unless given, torch's generator draws one
                permutation, or five in eval mode.
            walks: (hops + 1, nodes, walks), see `graph_walks.random_walks`, which draws them unless given.

        Returns:
            (graphs, outputs), or (nodes, outputs) where the data's task is one of nodes; of what fills up only nodes.
        """
        edge_index, number, nodes = batch["edge_index"], batch["batch"], len(batch["x"])
        graphs = Sequences.of(number, batch["ptr"], len(batch["longest"]) if "longest" in batch else None)
        dtype = self.head[-1].weight.dtype
        of_nodes, of_edges = find_real(batch)
        alone = not self.training or not isinstance(self.layers[0].norm_out, nn.SyncBatchNorm)
        real = Real.of(of_nodes, dtype, alone), Real.of(of_edges, dtype, alone)
        h, e = self.of_nodes(batch["x"], real[0]), self.of_edges(batch["edge_attr"], real[1])
        if self.of_positions is not None:
            h = h + self.of_positions(batch["random_walk_pe"], real[0])
        h, e = (t.to(dtype) for t in (h, e))  # under autocast too, whose dtype is too coarse to add up in
        if self.of_walks is not None:
            if walks is None:
                walks = random_walks(edge_index, nodes, self.sizes.walks, self.sizes.hops)
            h = self._compute(self.of_walks, h, walks, real[0])
        if noise is None:
            noise = torch.rand(len(self.layers), 1 if self.training else _PERMUTATIONS, nodes, device=h.device)
        edges = Ends.of_both(edge_index, nodes, of_edges)
        for layer, orders in zip(self.layers, degree_orders(edge_index, number, noise), strict=True):
            h, e = self._compute(layer, h, e, edges, graphs, orders, real)
        if self.sizes.data.task != "nodes":
            h = torch.segment_reduce(h, self.sizes.pooling, lengths=graphs.lengths, unsafe=True)  # of lengths that add up
            h = h if real[0] is None else h[:-1]
        return self.head(h)

    def _compute(self, part: nn.Module, *given: Any) -> Any:
        """Its results, for which the backward may compute it again."""
        if not (self.checkpoint_activations and self.training):
            return part(*given)
        # no part draws, and a CUDA graph cannot hold what keeps the generator's state
        return checkpoint(part, *given, use_reentrant=False, preserve_rng_state=False,
                          context_fn=lambda: (nullcontext(), keep_statistics(part)))


class _Categories(nn.Module):
    """Columns of categories to the sum of their embeddings: (rows, columns) int64 to (rows, d_model)."""

    def __init__(self, counts: tuple[int, ...], d_model: int):
        super().__init__()
        self.embedding = nn.Embedding(sum(counts), d_model)
        self.register_buffer("first", torch.tensor([sum(counts[:n]) for n in range(len(counts))]), persistent=False)

    def forward(self, columns: Tensor, _: Tensor | None = None) -> Tensor:
        return self.embedding(columns + self.first).sum(1)


class _Numbers(nn.Sequential):
    """Columns of numbers, normed, and so whatever their units are, through a linear map: (rows, columns) to (rows, d_model)."""

    def __init__(self, columns: int, d_model: int):
        super().__init__(nn.BatchNorm1d(columns), nn.Linear(columns, d_model))

    def forward(self, columns: Tensor, real: Real | None = None) -> Tensor:
        norm, linear = self
        return linear(normalise(norm, columns, real))


def _encoder(features: int | tuple[int, ...], d_model: int) -> nn.Module:
    """Of columns as `GraphData` describes them."""
    return _Categories(features, d_model) if isinstance(features, tuple) else _Numbers(features, d_model)


def _mixer(sizes: GraphSizes, variant: str) -> nn.Module:
    if sizes.mixer == "mamba1":
        return Mamba1(sizes.d_model, sizes.d_state, variant)
    return PackedMamba2(sizes.d_model, sizes.d_state, expand=1, headdim=sizes.headdim, chunk_size=sizes.chunk_size,
                        variant=variant)


def graph_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The mean loss in nats: binary cross-entropy of labels, cross-entropy of graphs' or nodes' classes.

    Of nodes, most of which are background, a class weighs as much as others make up of the batch: GraphGPS's
    weighted_cross_entropy (arXiv:2205.12454), by which Graph-Mamba trains too. One that is alone weighs as one node.
    """
    logits, y = model(batch).float(), batch["y"]
    match model.sizes.data.task:
        case "labels":
            return F.binary_cross_entropy_with_logits(logits, y.float())
        case "graphs":
            return F.cross_entropy(logits, y.long())
        case "nodes":
            counts = (y[:, None] == torch.arange(logits.shape[1], device=y.device)).sum(0)
            return F.cross_entropy(logits, y.long(), (counts.sum() - counts).clamp(min=1) / counts.sum())
