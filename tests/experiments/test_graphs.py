"""Graphs as data: made up as they are described, torch_geometric's data sets as it finds them, and what of those is refused."""

import pickle
import sys
from pathlib import Path

import networkx as nx
import numpy as np
import pytest
import torch

from experiments.workloads.graph_model import GraphSizes
from experiments.workloads.graphs import (
    MALNET_TINY,
    MNIST,
    PEPTIDES_FUNC,
    VOC_SP,
    GraphData,
    collate,
    find_returns,
    load_graphs,
)
from experiments.workloads.synthetic_chains import HOPS, SyntheticChains
from experiments.workloads.synthetic_superpixels import SyntheticSuperpixels
from tests.experiments.small import needs_graphs

DATA = {data.name: data for data in (PEPTIDES_FUNC, MNIST, VOC_SP, MALNET_TINY)}


def dataset(data: GraphData, root: str | Path = "synthetic", seed: int = 0):
    return load_graphs(str(root), GraphSizes(data, d_model=16, layers=1, headdim=16), seed)


def chain(source: SyntheticChains, number: int) -> tuple[nx.Graph, list[int], dict]:
    """A chain as networkx has it, and the alpha carbons of its residues."""
    drawn = source.graph(number)
    graph = nx.Graph(drawn["edge_index"].T.tolist())
    sizes = source.sizes[source.types(number)]
    return graph, (sizes.cumsum() - sizes + 1).tolist(), drawn


def test_labels_are_pairs_that_are_far_apart():
    source = SyntheticChains(10, (60, 300), 0)
    on = []
    for number in range(30):
        graph, centres, drawn = chain(source, number)
        types, hops = source.types(number).tolist(), dict(nx.all_pairs_shortest_path_length(graph))
        spans = [max((hops[a][b] for a, t in zip(centres, types, strict=True) for b, u in zip(centres, types, strict=True)
                      if (t, u) == (2 * label, 2 * label + 1)), default=0) for label in range(10)]
        assert drawn["spans"].tolist() == spans
        assert all(graph.degree(at) == 2 + (t != 20) for at, t in zip(centres[1:-1], types[1:-1], strict=True))
        on += [span > HOPS for span in spans]
    assert 0.15 < np.mean(on) < 0.35


def test_classes_of_chains_are_balanced():
    source = SyntheticChains(5, MALNET_TINY.nodes, 0)
    classes = np.bincount([source.spans(source.types(number)).argmax() for number in range(300)], minlength=5)
    assert len(classes) == 5 and classes.min() > 30


def test_edges_are_from_the_nearest():
    for neighbours, drawn in ((8, SyntheticSuperpixels((60, 82), 8, 0).digit(3)),
                              (6, SyntheticSuperpixels((60, 82), 6, 0).scene(3))):
        pos = drawn["pos"] if "pos" in drawn else drawn["x"][:, 12:]
        off = np.linalg.norm(pos[:, None] - pos[None], axis=-1)
        source, target = drawn["edge_index"]
        for node in range(len(pos)):
            expected = off[node].argsort()[1 : neighbours + 1]
            assert set(source[target == node]) == set(expected)
        nearness = drawn["edge_attr"].reshape(len(source), -1)[:, -1]
        assert (np.diff(nearness[off[source, target].argsort()]) <= 1e-6).all()


def test_pictures_show_what_they_are_called():
    source, light = SyntheticSuperpixels((60, 82), 8, 0), [[] for _ in range(10)]
    for number in range(300):
        drawn = source.digit(number)
        light[drawn["y"].item()].append(drawn["x"].mean())
    strokes = (6, 2, 5, 5, 4, 5, 6, 3, 7, 6)  # of a seven-segment display
    assert np.corrcoef(strokes, [np.mean(of) for of in light])[0, 1] > 0.9
    scenes = [SyntheticSuperpixels(VOC_SP.nodes, 6, 0).scene(number) for number in range(40)]
    seen = np.concatenate([scene["y"] for scene in scenes])
    assert set(seen) == set(range(21)) and 0.7 < (seen == 0).mean() < 0.9
    for scene in scenes:
        red = scene["x"][:, 0] > scene["x"][:, 2]
        objects = scene["y"] > 0
        assert (red == (scene["y"] <= 10))[objects].mean() > 0.9, "the palette says which ten"


@needs_graphs
@pytest.mark.parametrize("name", DATA)
def test_a_graph_is_the_same_whoever_asks(name):
    torch.manual_seed(0)
    first, second = dataset(DATA[name]), pickle.loads(pickle.dumps(dataset(DATA[name])))  # as workers get it where none forks
    before = torch.get_rng_state()
    second[7], second[3]
    one, again = first[5].to_dict(), second[5].to_dict()
    assert one.keys() == again.keys()
    assert all(torch.equal(t, again[key]) for key, t in one.items() if isinstance(t, torch.Tensor))
    for other in (first[6], dataset(DATA[name], seed=1)[5]):
        assert not torch.equal(other.edge_index, one["edge_index"])
    assert torch.equal(torch.get_rng_state(), before), "data draw nothing that steps draw"


@needs_graphs
def test_labels_and_classes_are_spans():
    labels, classes = dataset(PEPTIDES_FUNC), dataset(MALNET_TINY)
    spans = np.stack([labels.source.spans(labels.source.types(n)) for n in range(30)])
    assert HOPS in spans and np.array_equal(torch.cat([labels[n].y for n in range(30)]) == 1, spans > HOPS)
    for n in range(5):
        spans = classes.source.spans(classes.source.types(n))
        assert spans[classes[n].y.item()] == spans.max() > HOPS


@needs_graphs
@pytest.mark.parametrize("name", DATA)
def test_batches_have_what_the_model_takes(name):
    data = DATA[name]
    samples = [dataset(data)[n] for n in range(3)]
    batch = collate(samples)
    nodes, edges = sum(sample.num_nodes for sample in samples), sum(sample.num_edges for sample in samples)

    def form(features, rows):
        return ((rows, len(features)), torch.int64) if isinstance(features, tuple) else ((rows, features), torch.float32)

    expected = {
        "x": form(data.node_features, nodes), "edge_index": ((2, edges), torch.int64),
        "edge_attr": form(data.edge_features, edges), "batch": ((nodes,), torch.int64), "ptr": ((4,), torch.int64),
        "y": {"labels": ((3, 10), torch.float32), "graphs": ((3,), torch.int64), "nodes": ((nodes,), torch.int64)}[data.task]}
    if data.pe_steps:
        expected["random_walk_pe"] = ((nodes, 8), torch.float32)
    assert {name: (tuple(t.shape), t.dtype) for name, t in batch.items()} == expected
    assert torch.equal(batch["ptr"].diff(), torch.bincount(batch["batch"]))
    assert torch.equal(batch["edge_index"][:, -samples[-1].num_edges:] - batch["ptr"][-2], samples[-1].edge_index)


@needs_graphs
@pytest.mark.parametrize("data", [data for data in DATA.values() if data.pe_steps], ids=lambda data: data.name)
def test_returns_are_those_of_the_library(data):
    from torch_geometric.transforms import AddRandomWalkPE

    for n in range(3):
        graph = dataset(data)[n]
        expected = AddRandomWalkPE(data.pe_steps, "expected")(graph.clone()).expected
        torch.testing.assert_close(graph.random_walk_pe, expected, rtol=1e-5, atol=1e-6)


@needs_graphs
def test_returns_of_nodes_that_none_leave():
    assert torch.equal(find_returns(torch.tensor([[0, 1, 1], [1, 0, 2]]), 3, 3), torch.tensor([[0, 0.5, 0]] * 2 + [[0.0] * 3]))


def raw(root: Path, data: GraphData, count: int = 4) -> Path:
    """Files as those who made the data sets publish them, with small graphs."""
    torch.manual_seed(0)
    folder = root / data.folder / "raw"
    folder.mkdir(parents=True)
    edges = torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
    splits = ("train", "val", "test")
    match data.name:
        case "Peptides-func":
            of_graph = [(torch.randint(2, (3, 9)), torch.randint(2, (4, 3)), edges, torch.eye(10)[None, n])
                        for n in range(count)]
            for split in splits:
                torch.save(of_graph, folder / f"{split}.pt")
        case "PascalVOC-SP":
            of_graph = [(torch.rand(3, 14).double(), torch.rand(4, 2), edges, [n % 21, 0, 20]) for n in range(count)]
            for split in splits:
                (folder / f"{split}.pickle").write_bytes(pickle.dumps(of_graph))
        case "MNIST":
            of_graph = [{"x": torch.rand(3, 1), "pos": torch.rand(3, 2), "edge_index": edges, "edge_attr": torch.rand(4),
                         "y": torch.tensor([n % 10])} for n in range(count)]
            torch.save([of_graph] * 3, folder / "MNIST_v2.pt")
        case "MalNetTiny":
            (folder / "split_info_tiny" / "type").mkdir(parents=True)
            kinds = ("addisplay", "adware", "benign", "downloader", "trojan")
            for split in splits:
                names = [f"{kinds[n % 5]}/{split}{n}" for n in range(count)]
                (folder / "split_info_tiny" / "type" / f"{split}.txt").write_text("".join(name + "\n" for name in names))
                for n, name in enumerate(names):
                    file = folder / "malnet-graphs-tiny" / f"{name}.edgelist"
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_text("# comment\n" * 5 + f"0 1\n1 2\n2 {3 + n}\n")
    return folder


@needs_graphs
@pytest.mark.parametrize("name", DATA)
def test_data_sets_are_read_whole_once_an_epoch(tmp_path, name):
    raw(tmp_path, DATA[name])
    found, again = dataset(DATA[name], tmp_path), dataset(DATA[name], tmp_path)

    def content(graph):
        return tuple(graph.x.flatten().tolist()), tuple(graph.y.flatten().tolist())

    epochs = [[content(found[n]) for n in range(first, first + 4)] for first in (0, 4, 8, 12)]
    assert all(sorted(epoch) == sorted(epochs[0]) and len(set(epoch)) == 4 for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1 and found.floor is None
    assert content(again[9]) == epochs[2][1], "whatever was read before"
    made_up = collate([dataset(DATA[name])[0]])
    batch = collate([found[n] for n in range(2)])
    assert {key: (t.dtype, t.shape[1:] if key != "edge_index" else 2) for key, t in batch.items()} == {
        key: (t.dtype, t.shape[1:] if key != "edge_index" else 2) for key, t in made_up.items()}


@needs_graphs
def test_missing_data_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"--data: got 'nowhere', where no folder is, expected synthetic, or the root "
                                                r"of torch_geometric's LRGBDataset with Peptides-func"):
        dataset(PEPTIDES_FUNC, "nowhere")
    (tmp_path / "book.txt").write_text("words")
    with pytest.raises(FileNotFoundError, match=rf"--data: got {tmp_path}, expected .* with MNIST in {tmp_path}/MNIST/raw, or"):
        dataset(MNIST, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["book.txt"]


@needs_graphs
@pytest.mark.parametrize("content", [b"", b"not a pickle", pickle.dumps([1, 2], 2)])
def test_damaged_files_are_named(tmp_path, content):
    (raw(tmp_path, PEPTIDES_FUNC) / "train.pt").write_bytes(content)
    with pytest.raises(ValueError, match=rf"--data: torch_geometric's LRGBDataset makes no Peptides-func of {tmp_path}"):
        dataset(PEPTIDES_FUNC, tmp_path)


@pytest.mark.parametrize("use", [lambda: dataset(PEPTIDES_FUNC), lambda: collate([])])
def test_without_torch_geometric(monkeypatch, use):
    for module in ("data", "transforms"):
        monkeypatch.setitem(sys.modules, f"torch_geometric.{module}", None)
    with pytest.raises(ImportError, match=r"torch_geometric, which has graphs .*: pip install torch-geometric"):
        use()
