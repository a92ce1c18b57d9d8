"""The layers of graph models: messages along edges, orders by degree, mixers that keep sequences apart, random walks."""

import pytest
import torch

from experiments.workloads.graph_edges import Ends
from experiments.workloads.graph_layers import GatedGCN, degree_orders, mix_in_order
from experiments.workloads.graph_mixers import Bidirectional, Mamba1, PackedMamba2, Sequences
from experiments.workloads.graph_walks import random_walks
from ssd.block import mamba_inner_fn

pytestmark = pytest.mark.usefixtures("small")
LENGTHS = (5, 1, 40, 3)
EXACT = {"rtol": 1e-9, "atol": 1e-9}


def sequences(lengths=LENGTHS) -> Sequences:
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return Sequences.of(torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)), ends)


def mixer(name: str, d_model: int = 16) -> torch.nn.Module:
    if name == "mamba1":
        return Mamba1(d_model, 4, "torch").double()
    return PackedMamba2(d_model, 16, expand=1, headdim=8, chunk_size=16, variant="torch").double()


def test_messages_are_those_of_a_loop():
    torch.manual_seed(0)
    layer = GatedGCN(6).double().eval()
    for norm in (layer.norm_nodes, layer.norm_edges):
        norm.running_mean.normal_(), norm.running_var.uniform_(0.5, 2), norm.weight.data.normal_()
    h, e = torch.randn(5, 6).double(), torch.randn(7, 6).double()
    edge_index = torch.tensor([[0, 1, 2, 2, 3, 0, 0], [1, 0, 1, 2, 1, 1, 4]])  # a loop at 2, one edge twice, none into 3
    (A, D, B, E), (a, d, b, g) = layer.of_nodes.weight.split(6), layer.of_nodes.bias.split(6)
    raw = [D @ h[j] + d + E @ h[i] + g + layer.of_edges(e[n]) for n, (i, j) in enumerate(edge_index.T.tolist())]
    expected = []
    for node in range(5):
        into = [(raw[n].sigmoid(), B @ h[i] + b) for n, (i, j) in enumerate(edge_index.T.tolist()) if j == node]
        weighted, weights = sum((w * v for w, v in into), torch.zeros(6)), sum((w for w, _ in into), torch.zeros(6))
        expected.append(A @ h[node] + a + weighted / (weights + 1e-6))
    after_h, after_e = layer(h, e, Ends.of_both(edge_index, 5))
    torch.testing.assert_close(after_h, h + layer.norm_nodes(torch.stack(expected)).relu(), **EXACT)
    torch.testing.assert_close(after_e, e + layer.norm_edges(torch.stack(raw)).relu(), **EXACT)


def test_sums_of_many_edges_are_no_coarser_than_their_dtype():
    """Under autocast what nodes send is bf16, and so are its gradients: one after another, ones in bf16 add up to 256."""
    ends = Ends.of(torch.zeros(1000, dtype=torch.long), 2)
    sent = torch.ones(2, 3, dtype=torch.bfloat16, requires_grad=True)
    ends.take(sent).sum().backward()
    assert torch.equal(sent.grad, torch.tensor([[1000.0] * 3, [0.0] * 3]).bfloat16())


def test_orders_are_by_graph_then_degree_and_are_undone():
    graphs = sequences()
    nodes = sum(LENGTHS)
    edge_index = torch.randint(nodes, (2, 40))
    noise = torch.rand(3, 2, nodes)
    noise[0, 0, ::2], noise[0, 0, 1::2] = 1 - 2**-24, 0  # the largest there is, which no rounding may take to the next degree
    orders = degree_orders(edge_index, graphs.number, noise)
    degree = torch.bincount(edge_index[0], minlength=nodes)
    for order, drawn in zip(orders.flatten(0, 1), noise.flatten(0, 1), strict=True):
        keys = [(graphs.number[n].item(), degree[n].item(), drawn[n].item()) for n in order]
        assert keys == sorted(keys) and order.sort().values.tolist() == list(range(nodes))
        h = torch.randn(nodes, 3)
        assert torch.equal(mix_in_order(lambda row, _: row, h, graphs, order), h)
        places = mix_in_order(lambda row, its: its.place[:, None], h, graphs, order)[:, 0]
        assert torch.equal(places[order], graphs.place)
    assert not torch.equal(orders[1, 0], orders[1, 1])


def test_mamba1_is_the_inner_function_on_each_sequence():
    torch.manual_seed(0)
    block = mixer("mamba1")
    row = torch.randn(sum(LENGTHS), 16).double()
    mixed = block(row, sequences()).split(LENGTHS)
    for part, expected in zip(mixed, row.split(LENGTHS), strict=True):
        alone = mamba_inner_fn(
            block.in_proj(expected).T[None], block.conv1d.weight, block.conv1d.bias, block.x_proj.weight, block.dt_proj.weight,
            block.out_proj.weight, None, -block.A_log.exp(), D=block.D, delta_bias=block.dt_proj.bias, delta_softplus=True)
        torch.testing.assert_close(part, alone[0], **EXACT)


@pytest.mark.parametrize("name", ["mamba1", "ssd"])
def test_both_directions(name):
    torch.manual_seed(0)
    both = Bidirectional(lambda: mixer(name))
    row = torch.randn(sum(LENGTHS), 16).double()
    for part, alone in zip(both(row, sequences()).split(LENGTHS), row.split(LENGTHS), strict=True):
        single = sequences((len(alone),))
        torch.testing.assert_close(part, both.along(alone, single) + both.against(alone.flip(0), single).flip(0), **EXACT)


def test_walks_follow_edges_evenly():
    torch.manual_seed(0)
    edge_index = torch.tensor([[0, 0, 0, 1, 2], [1, 2, 3, 0, 3]])  # none leaves 3 and 4
    walks = random_walks(edge_index, 5, walks=3000, hops=3)
    assert walks.shape == (4, 5, 3000) and (walks[0] == torch.arange(5)[:, None]).all()
    steps = set(zip(walks[:-1].flatten().tolist(), walks[1:].flatten().tolist(), strict=True))
    assert steps == {*map(tuple, edge_index.T.tolist()), (3, 3), (4, 4)}
    assert torch.bincount(walks[1, 0]).tolist()[1:] == pytest.approx([1000] * 3, rel=0.1)
    empty = random_walks(torch.empty(2, 0, dtype=torch.int64), 2, walks=1, hops=2)
    assert empty.squeeze(-1).tolist() == [[0, 1]] * 3
