"""Graphs by number for graph models: made up, or torch_geometric's data sets, in batches of tensors by name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from ..packages import import_package
from ..terminal import first_line
from .epochs import Epochs
from .synthetic_chains import HOPS, SyntheticChains
from .synthetic_superpixels import SyntheticSuperpixels

if TYPE_CHECKING:
    from torch_geometric.data import Data

    from .graph_model import GraphSizes

_NEIGHBOURS = {"MNIST": 8, "PascalVOC-SP": 6}  # of a superpixel; the data sets have 8.0 and 5.7 edges to a node
_TENSORS = ("x", "edge_index", "edge_attr", "random_walk_pe", "y", "batch", "ptr")


@dataclass(frozen=True)
class GraphData:
    """What a data set's graphs are.

    Attributes:
        package, name, folder: torch_geometric's class, the data set's name, and its folder below the root.
        node_features, edge_features: columns of numbers, or how many categories each column has.
        task: "labels", of graphs, any number of them; "graphs" or "nodes", of which each has one class.
        outputs: labels or classes.
        pe_steps: of the random walks of `find_returns`; 0 for no positional encoding.
        nodes: of a graph that is made up, the fewest and the most.
    """

    package: str
    name: str
    folder: str
    node_features: int | tuple[int, ...]
    edge_features: int | tuple[int, ...]
    task: str
    outputs: int
    pe_steps: int
    nodes: tuple[int, int]


# Categories are counted as in ogb.utils.features, of which Peptides are made.
PEPTIDES_FUNC = GraphData("LRGBDataset", "Peptides-func", "peptides-func", (119, 5, 12, 12, 10, 6, 6, 2, 2), (5, 6, 2),
                          "labels", 10, pe_steps=8, nodes=(60, 300))
MNIST = GraphData("GNNBenchmarkDataset", "MNIST", "MNIST", 3, 1, "graphs", 10, pe_steps=8, nodes=(60, 82))
VOC_SP = GraphData("LRGBDataset", "PascalVOC-SP", "pascalvoc-sp", 14, 2, "nodes", 21, pe_steps=0, nodes=(458, 500))
MALNET_TINY = GraphData("MalNetTiny", "MalNetTiny", "", 5, (1,), "graphs", 5, pe_steps=0, nodes=(700, 2120))


class SyntheticGraphs(Dataset):
    """Graphs that are made up, in the form of those of one of torch_geometric's data sets.

    Args:
        data: which data set.
        seed: of the graphs.
    """

    floor = samples = None

    def __init__(self, data: GraphData, seed: int):
        self.data, self.columns = data, Columns(data)
        if data.name in _NEIGHBOURS:
            self.source = SyntheticSuperpixels(data.nodes, _NEIGHBOURS[data.name], seed)
        else:
            self.source = SyntheticChains(data.outputs, data.nodes, seed)

    def __getitem__(self, number: int) -> Data:
        values = {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value
                  for name, value in self._make_graph(number).items()}
        return self.columns(_torch_geometric("data").Data.from_dict(values))

    def _make_graph(self, number: int) -> dict[str, np.ndarray | int]:
        match self.data.name:
            case "MNIST":
                return self.source.digit(number)
            case "PascalVOC-SP":
                return self.source.scene(number)
        chain = self.source.graph(number)
        spans = chain.pop("spans")
        if self.data.task == "labels":
            return {**chain, "y": (spans > HOPS).astype(np.float32)[None]}
        return {"edge_index": chain["edge_index"], "num_nodes": len(chain["x"]), "y": spans.argmax(keepdims=True)}


class LocalGraphs(Dataset):
    """The training graphs of one of torch_geometric's data sets, in an order drawn anew for each epoch.

    Args:
        root: what the data set's class takes. Unless the data set is in it, it must be empty, and the class downloads into it.
        data: which data set.
        seed: of the order.

    Raises:
        FileNotFoundError, ValueError: naming the folder, and what is wrong with it.
    """

    floor = None

    def __init__(self, root: Path, data: GraphData, seed: int):
        self.graphs = _read(root, data)
        self.samples = len(self.graphs)
        self._epochs = Epochs(self.samples, seed)

    def __getitem__(self, number: int) -> Data:
        return self.graphs[self._epochs.place(number)]


class Columns:
    """Gives a graph of the data set columns of features, in place.

    Nodes get their places, or torch_geometric's LocalDegreeProfile if they have nothing, and the positional encoding; edges
    that have nothing get the category 0.
    """

    def __init__(self, data: GraphData):
        self.degrees = _torch_geometric("transforms").LocalDegreeProfile()
        self.pe_steps = data.pe_steps

    def __call__(self, graph: Data) -> Data:
        if graph.x is None:
            graph = self.degrees(graph)
        if graph.pos is not None:
            graph.x, graph.pos = torch.cat([graph.x, graph.pos], 1), None
        if graph.edge_attr is None:
            graph.edge_attr = torch.zeros(graph.num_edges, 1, dtype=torch.int64)
        graph.edge_attr = graph.edge_attr.view(graph.num_edges, -1)
        if self.pe_steps:
            graph.random_walk_pe = find_returns(graph.edge_index, graph.num_nodes, self.pe_steps)
        return graph


def find_returns(edge_index: Tensor, nodes: int, steps: int) -> Tensor:
    """(nodes, steps) fp32: how likely a random walk from each node is back there after 1, 2, ... steps.

    As torch_geometric's AddRandomWalkPE where no edge comes twice, in a sixth of its time: a walk's step is a sparse matrix,
    which that makes dense.
    """
    likely = 1.0 / torch.bincount(edge_index[0], minlength=nodes).clamp(min=1)
    step = torch.sparse_coo_tensor(edge_index, likely[edge_index[0]], (nodes, nodes), check_invariants=False)
    walked = step.to_dense()
    returns = [walked.diagonal()]
    for _ in range(steps - 1):
        walked = step @ walked
        returns.append(walked.diagonal())
    return torch.stack(returns, 1)


def load_graphs(data: str, sizes: GraphSizes, seed: int) -> SyntheticGraphs | LocalGraphs:
    """What --data names: "synthetic", or the root of the preset's data set, see `LocalGraphs`.

    Raises:
        FileNotFoundError, ValueError: naming what came and what is accepted.
        ImportError: torch_geometric is missing.
    """
    return SyntheticGraphs(sizes.data, seed) if data == "synthetic" else LocalGraphs(Path(data), sizes.data, seed)


def collate(samples: list[Data]) -> dict[str, Tensor]:
    """Graphs as one graph in parts.

    Returns:
        x (nodes, columns), edge_index (2, edges) int64, edge_attr (edges, columns), and where there is one random_walk_pe
        (nodes, steps); y (graphs, labels) fp32, or (graphs,) or (nodes,) int64; batch (nodes,) int64, each node's graph, which
        rises; ptr (graphs + 1,) int64, 0 and the places at which graphs end.
    """
    batch = _torch_geometric("data").Batch.from_data_list(samples)
    return {name: batch[name] for name in _TENSORS if name in batch}


def _read(root: Path, data: GraphData) -> Dataset:
    of, folder = f"torch_geometric's {data.package}", root / data.folder
    if not root.is_dir():
        raise FileNotFoundError(f"--data: got {str(root)!r}, where no folder is, expected synthetic, or the root of {of} with "
                                f"{data.name}; an empty one is downloaded into")
    if not (folder / "raw").is_dir() and any(path.is_file() for path in root.rglob("*")):
        raise FileNotFoundError(f"--data: got {root}, expected the root of {of}, with {data.name} in {folder / 'raw'}, or an "
                                "empty folder, which is downloaded into")
    make = getattr(_torch_geometric("datasets"), data.package)
    named = {} if data.name == data.package else {"name": data.name}
    try:
        found = make(str(root), split="train", pre_transform=Columns(data), **named)
    except Exception as reason:  # whatever it is that pickle, zip, torch, the network and the file system raise in there
        raise ValueError(f"--data: {of} makes no {data.name} of {folder}: {type(reason).__name__}, {first_line(reason)}; its "
                         "folder processed is made anew of raw if it is removed") from reason
    _check(found, data, folder)
    return found


def _check(found: Dataset, data: GraphData, folder: Path) -> None:
    """Refuses graphs that are not what the data set's are, or were processed for another model."""
    described = {"x": data.node_features, "edge_attr": data.edge_features, "random_walk_pe": data.pe_steps}
    for name, features in described.items():
        t = getattr(found, name, None)
        if features and not (isinstance(t, Tensor) and _are_columns(t, features)):
            kind = f"columns of categories, {features}" if isinstance(features, tuple) else f"{features} columns of numbers"
            raise _strange(folder, name, t, kind)
    shape, classes = {"labels": ((len(found), data.outputs), 2), "graphs": ((len(found),), data.outputs),
                      "nodes": ((len(found.x),), data.outputs)}[data.task]
    y = getattr(found, "y", None)
    if not isinstance(y, Tensor) or y.shape != shape or not ((y >= 0) & (y < classes) & (y == y.round())).all():
        raise _strange(folder, "y", y, f"{shape}, whole numbers below {classes}")


def _are_columns(t: Tensor, features: int | tuple[int, ...]) -> bool:
    if isinstance(features, int):
        return t.is_floating_point() and t.shape[1:] == (features,)
    fit = not t.is_floating_point() and t.shape[1:] == (len(features),)
    return fit and bool(((t >= 0) & (t < torch.tensor(features))).all())


def _strange(folder: Path, name: str, t: Tensor | None, expected: str) -> ValueError:
    got = f"{tuple(t.shape)} {t.dtype}, {t.min()} to {t.max()}" if isinstance(t, Tensor) and t.numel() else "nothing"
    return ValueError(f"--data: {folder} has {name} of {got}, expected {expected}; if its folder processed was made with other "
                      "transforms, remove that")


def _torch_geometric(module: str) -> ModuleType:
    return import_package(f"torch_geometric.{module}", "has graphs and makes batches of them", "pip install torch-geometric")
