"""The model of graphs: sizes, graphs that see nothing of each other, numbers of nodes that mean nothing, losses; training."""

import math
import statistics
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from experiments.train import train
from experiments.workloads import Preset, get_workload
from experiments.workloads.graph_edges import Ends
from experiments.workloads.graph_layers import degree_orders
from experiments.workloads.graph_mixers import Sequences
from experiments.workloads.graph_model import GraphModel, graph_loss
from experiments.workloads.graphs import MALNET_TINY, MNIST, PEPTIDES_FUNC, VOC_SP, GraphData
from tests.experiments.small import VARIANT, graph_sizes, needs_graphs, read_log, small_run
from tests.experiments.test_train import QUIET

pytestmark = pytest.mark.usefixtures("small")
KINDS = [("mamba1", "nodes"), ("ssd", "nodes"), ("mamba1", "walks"), ("ssd", "walks")]
NODES = (7, 1, 12, 4)


def batch_of(nodes=NODES, data: GraphData = PEPTIDES_FUNC, edges: int = 3) -> dict[str, torch.Tensor]:
    """Graphs of so many nodes, with that many random edges for each node but those that are alone."""
    number = torch.arange(len(nodes)).repeat_interleave(torch.tensor(nodes))
    ptr = torch.tensor([0, *nodes]).cumsum(0)
    edge_index = torch.cat([torch.randint(low, high, (2, edges * (high - low) * (high - low > 1)))
                            for low, high in ptr.unfold(0, 2, 1).tolist()], 1)

    def columns(features, rows):
        if isinstance(features, tuple):
            return torch.stack([torch.randint(count, (rows,)) for count in features], 1)
        return torch.randn(rows, features)

    y = {"labels": torch.randint(2, (len(nodes), data.outputs)).float(), "graphs": torch.randint(data.outputs, (len(nodes),)),
         "nodes": torch.randint(data.outputs, (len(number),))}[data.task]
    return {"x": columns(data.node_features, len(number)), "random_walk_pe": torch.rand(len(number), data.pe_steps),
            "edge_index": edge_index, "edge_attr": columns(data.edge_features, edge_index.shape[1]), "y": y, "batch": number,
            "ptr": ptr}


def convert_to_fp64(batch):
    return {name: t.double() if t.is_floating_point() else t for name, t in batch.items()}


@pytest.fixture(params=KINDS, ids="-".join)
def trained(request, small):
    """A model in fp64 and eval mode, with norms that have seen the batch, the batch, and random numbers for both."""
    torch.manual_seed(0)
    mixer, tokens = request.param
    model, batch = GraphModel(graph_sizes(mixer=mixer, tokens=tokens), "torch").double(), convert_to_fp64(batch_of())
    with torch.no_grad():
        model(batch)
    return model.eval(), batch, draw(batch)


def draw(batch) -> dict[str, torch.Tensor]:
    """The random numbers of `GraphModel.forward` in eval mode; walks go to any node of the graph."""
    number, ptr = batch["batch"], batch["ptr"]
    low, high = ptr[number, None], ptr[number + 1, None]
    walks = torch.arange(len(number))[:, None].expand(-1, 2)
    return {"noise": torch.rand(2, 5, len(number)),
            "walks": torch.stack([walks, *(low + torch.rand(2, len(number), 2) * (high - low)).long()])}


@pytest.mark.parametrize("pooling", ["mean", "max"])
@pytest.mark.parametrize("tokens", ["nodes", "walks"])
def test_the_model_is_its_parts(pooling, tokens):
    torch.manual_seed(0)
    batch = batch_of()
    random = draw(batch)
    model = GraphModel(graph_sizes(mixer="ssd", tokens=tokens, pooling=pooling), "torch").eval()
    h, e = model.of_nodes(batch["x"]) + model.of_positions(batch["random_walk_pe"]), model.of_edges(batch["edge_attr"])
    if tokens == "walks":
        h = model.of_walks(h, random["walks"])
    for layer, noise in zip(model.layers, random["noise"], strict=True):
        orders = degree_orders(batch["edge_index"], batch["batch"], noise)
        h, e = layer(h, e, Ends.of_both(batch["edge_index"], len(h)), Sequences.of(batch["batch"], batch["ptr"]), orders)
    pooled = torch.stack([nodes.mean(0) if pooling == "mean" else nodes.amax(0) for nodes in h.split(NODES)])
    torch.testing.assert_close(model(batch, **random), model.head(pooled))


def test_a_graph_among_many_is_as_alone(trained):
    model, batch, random = trained
    together = model(batch, **random)
    for graph, (low, high) in enumerate(batch["ptr"].unfold(0, 2, 1).tolist()):
        nodes = slice(low, high)
        edges = (batch["edge_index"][0] >= low) & (batch["edge_index"][0] < high)
        alone = {"x": batch["x"][nodes], "random_walk_pe": batch["random_walk_pe"][nodes],
                 "edge_index": batch["edge_index"][:, edges] - low, "edge_attr": batch["edge_attr"][edges],
                 "batch": torch.zeros(high - low, dtype=torch.int64), "ptr": torch.tensor([0, high - low])}
        found = model(alone, random["noise"][..., nodes], random["walks"][:, nodes] - low)
        torch.testing.assert_close(found[0], together[graph], rtol=1e-9, atol=1e-9)
        assert (together[graph] != together[graph - 1]).all()


def test_the_numbers_of_nodes_mean_nothing(trained):
    model, batch, random = trained
    order = torch.cat([low + torch.randperm(high - low) for low, high in batch["ptr"].unfold(0, 2, 1).tolist()])
    new = order.argsort()
    edges = torch.randperm(batch["edge_index"].shape[1])
    other = {**batch, "x": batch["x"][order], "random_walk_pe": batch["random_walk_pe"][order],
             "edge_index": new[batch["edge_index"][:, edges]], "edge_attr": batch["edge_attr"][edges]}
    moved = model(other, random["noise"][..., order], new[random["walks"][:, order]])
    torch.testing.assert_close(moved, model(batch, **random), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mixer, tokens", KINDS)
@pytest.mark.parametrize("nodes, edges", [(NODES, 0), ((1, 1), 1), ((3, 1), 1)])
def test_graphs_of_one_node_and_without_edges(mixer, tokens, nodes, edges):
    batch = batch_of(nodes, edges=edges)
    assert edges or batch["edge_index"].shape == (2, 0)
    model = GraphModel(graph_sizes(mixer=mixer, tokens=tokens), "torch")
    graph_loss(model, batch).backward()
    model.eval()
    assert model(batch).isfinite().all()
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        assert t.isfinite().all() and (t.grad is None or t.grad.isfinite().all()), name


@pytest.mark.parametrize("data, pooling", [(MNIST, "mean"), (MALNET_TINY, "max"), (VOC_SP, "mean")])
def test_losses_of_classes(data, pooling):
    torch.manual_seed(0)
    batch = batch_of(data=data)
    model = GraphModel(graph_sizes(data=data, pooling=pooling, head_layers=3, mixer="ssd"), "torch")
    noise = torch.rand(2, 1, sum(NODES))
    model.forward = lambda given, forward=model.forward: forward(given, noise)
    logits, y = model(batch), batch["y"]
    assert logits.shape == (len(y), data.outputs)
    each = F.cross_entropy(logits, y, reduction="none")
    weights = torch.ones(len(y))
    if data.task == "nodes":
        weights = torch.tensor([(y != own).float().mean() for own in y])
    torch.testing.assert_close(graph_loss(model, batch), (weights * each).sum() / weights.sum())


@needs_graphs
@pytest.mark.parametrize("mixer, tokens", [("mamba1", "nodes"), ("ssd", "nodes"), ("ssd", "walks")])
def test_the_loss_falls_below_chance(tmp_path, monkeypatch, mixer, tokens):
    """On drawn digits, each as frequent as any other."""
    preset = Preset(graph_sizes(data=replace(MNIST, nodes=(40, 50)), tokens=tokens), batch=8, lr=2e-2, weight_decay=0.01)
    monkeypatch.setitem(get_workload("graphmamba").presets, "small", preset)
    variant = "auto" if mixer == "mamba1" else VARIANT
    run = small_run("graphmamba", mixer=mixer, variant=variant, steps=40)
    row = train(run, tmp_path / "run", QUIET, rows=tmp_path / "rows")
    assert statistics.mean(read_log(tmp_path / "run")[-10:]) < math.log(10) - 0.25
    assert row["unit"] == "graphs" and row["floor"] is None and row["seqlen"] is None
