"""Batches of graphs that are filled up: few sizes, and the same results, statistics and gradients as without."""

import pickle
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from experiments.parallel import Team, make_single
from experiments.training_run import Run, make_run
from experiments.training_step import _collate, make_batches
from experiments.workloads import get_workload
from experiments.workloads.graph_model import GraphModel, graph_loss
from experiments.workloads.graph_padding import Real, count, count_fill, fill_up, normalise, round_up
from experiments.workloads.graphs import MALNET_TINY, MNIST, PEPTIDES_FUNC, VOC_SP
from tests.distributed.ranks import Ranks
from tests.experiments.small import graph_sizes, needs_graphs, small_run
from tests.experiments.test_graphmamba import KINDS, batch_of, convert_to_fp64

pytestmark = pytest.mark.usefixtures("small")


def fill(batch, data=PEPTIDES_FUNC, mixer="mamba1", buckets=2):
    """The batch filled up, for a run on such data."""
    run = make_run("graphmamba", "small", mixer=mixer, buckets=buckets)
    return fill_up(_On(run, replace(run.sizes, data=data)), batch)


class _On:
    """A run with other sizes."""

    def __init__(self, run, sizes):
        self.mixer, self.buckets, self.sizes = run.mixer, run.buckets, sizes


def compute(model: GraphModel, batch, **drawn) -> list[torch.Tensor]:
    """Logits of what is real, gradients of a sum of them, and what norms have counted."""
    logits = model(batch, **drawn)[: len(batch["y"])]
    weights = torch.arange(logits.numel(), dtype=logits.dtype).view_as(logits).sin()
    grads = torch.autograd.grad((logits * weights).sum(), [p for p in model.parameters() if p.requires_grad])
    return [logits.detach(), *grads, *model.buffers()]


@pytest.mark.parametrize("mixer, tokens", KINDS, ids="-".join)
@pytest.mark.parametrize("data", [PEPTIDES_FUNC, MALNET_TINY], ids=lambda data: data.name)
def test_nothing_of_what_fills_a_batch_up_is_seen(data, mixer, tokens):
    torch.manual_seed(0)
    model = GraphModel(graph_sizes(data=data, mixer=mixer, tokens=tokens, pooling="max"), "torch").double()
    state, batch = {name: t.clone() for name, t in model.state_dict().items()}, convert_to_fp64(batch_of(data=data))
    filled = fill(batch, data, mixer)
    nodes, most = len(batch["x"]), len(filled["x"])
    noise, walks = torch.rand(2, 1, most), torch.randint(nodes, (3, nodes, 2))
    expected = compute(model, batch, noise=noise[..., :nodes], walks=walks)
    walks = torch.cat([walks, torch.arange(nodes, most)[None, :, None].expand(3, -1, 2)], 1)
    found = []
    for scale in (0, 3):
        model.load_state_dict(state)
        filled["x"][nodes:] = scale if filled["x"].is_floating_point() else 1
        filled["edge_attr"][batch["edge_index"].shape[1]:] = min(scale, 0 if data is MALNET_TINY else 1)
        found.append(compute(model, filled, noise=noise, walks=walks))
    torch.testing.assert_close(found[0], expected, rtol=1e-9, atol=1e-10)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True)), "what stands there changes no bit"


@pytest.mark.parametrize("data", [PEPTIDES_FUNC, MNIST, VOC_SP], ids=lambda data: data.name)
def test_losses_are_of_what_is_real(data):
    """In eval mode, where the order of nodes of one degree is all that is drawn: each has one of its own here."""
    torch.manual_seed(0)
    model = GraphModel(graph_sizes(data=data, mixer="ssd"), "torch").double().eval()
    batch, edges = convert_to_fp64(batch_of((2, 1, 1), data, edges=0)), convert_to_fp64(batch_of((2,), data, edges=1))
    batch |= {"edge_index": torch.tensor([[0], [1]]), "edge_attr": edges["edge_attr"][:1]}
    filled = fill(batch, data, "ssd")
    assert len(filled["x"]) == 8 and len(filled["edge_attr"]) == 8
    torch.testing.assert_close(graph_loss(model, filled), graph_loss(model, batch))


def norm_part(group: dist.ProcessGroup, parts: list[tuple[Tensor, Tensor, Tensor]]) -> list[Tensor]:
    """Of this rank's rows, those that are real, and their gradient out: results, gradients, and what the norm has counted."""
    x, rows, dout = parts[dist.get_rank(group)]
    norm = nn.SyncBatchNorm(x.shape[1]).double()
    out = normalise(norm, x.requires_grad_(), Real.of(rows, x.dtype, alone=False))
    dx, dweight, dbias = torch.autograd.grad(out, [x, norm.weight, norm.bias], dout)
    return [out.detach(), dx, dweight, dbias, *norm.buffers()]


def test_norms_of_several_processes_see_the_real_rows_of_all(tmp_path):
    """Also where one has none."""
    torch.manual_seed(0)
    parts = [(5 + 3 * torch.randn(n, 4).double(), (torch.arange(n) < real)[:, None], torch.randn(n, 4).double())
             for n, real in ((8, 5), (16, 16), (8, 0))]
    for _, rows, dout in parts:
        dout *= rows
    started = Ranks(3, tmp_path / "store")
    found = started.run(3, norm_part, parts)
    started.end()
    x, dout = (torch.cat([part[n][part[1][:, 0]] for part in parts]) for n in (0, 2))
    norm = nn.BatchNorm1d(4).double()
    out = norm(x.requires_grad_())
    dx, dweight, dbias = torch.autograd.grad(out, [x, norm.weight, norm.bias], dout)
    for n, expected in ((0, out), (1, dx)):
        torch.testing.assert_close(torch.cat([of[n][part[1][:, 0]] for of, part in zip(found, parts, strict=True)]), expected)
    for n, expected in ((2, dweight), (3, dbias)):
        torch.testing.assert_close(sum(of[n] for of in found), expected)
    for of in found:
        torch.testing.assert_close(of[4:], list(norm.buffers()))


def test_sizes_are_few():
    for per_doubling in (1, 8):
        sizes = [round_up(count, per_doubling) for count in range(1, 5000)]
        assert all(count <= size and size % 8 == 0 for count, size in enumerate(sizes, 1)) and sizes == sorted(sizes)
        assert all(size < count * 2 ** (1 / per_doubling) + 9 for count, size in enumerate(sizes, 1))
        assert len(set(sizes)) <= 13 * per_doubling
    batch = fill(batch_of((6, 5)))
    assert len(batch["x"]) == 16 and len(batch["longest"]) == 8 and len(batch["edge_attr"]) == 48
    assert count_fill(batch) == pytest.approx((5 + 15) / 64) and count_fill(batch_of()) == 0


def test_several_processes_fill_up_to_the_largest():
    """Each number is of the process that has most of it: here nodes and the longest graph of one, edges of the other."""
    run = make_run("graphmamba", "small", mixer="mamba1", buckets=2)
    batches = batch_of((30, 2)), batch_of((5, 5), edges=40)
    counts = [count(batch) for batch in batches]
    largest = [max(numbers) for numbers in zip(*counts, strict=True)]
    assert counts[0] != largest != counts[1]
    one, other = ({name: t.shape for name, t in fill_up(run, batch, largest).items()} for batch in batches)
    assert one == other


def test_what_fills_batches_can_be_sent_to_another_process():
    """As a DataLoader does where processes are not forked, by default from Python 3.14 on."""
    run = make_run("graphmamba", "small", mixer="mamba1", buckets=2)
    sent = pickle.loads(pickle.dumps(partial(_collate, run)))
    assert sent.args == (run,)


def test_what_has_one_size_needs_none():
    with pytest.raises(ValueError, match="--buckets: got 4, expected none: batches of mamba2 are of one size"):
        small_run(buckets=4)
    with pytest.raises(ValueError, match="--buckets: got 0, expected at least 1"):
        small_run("graphmamba", buckets=0)


@needs_graphs
def test_batches_come_filled_up():
    workload, runs = get_workload("graphmamba"), [small_run("graphmamba", buckets=buckets) for buckets in (None, 4)]
    plain, filled = (next(make_batches(run, workload, workload.dataset(run), 0, make_single())) for run in runs)
    assert "longest" not in plain and len(filled["x"]) == round_up(len(plain["x"]) + 1, 4)
    assert all(torch.equal(filled[name][: len(t)], t) for name, t in plain.items() if name != "edge_index")


def draw_batches(group: dist.ProcessGroup, run: Run) -> list[dict[str, Tensor]]:
    """This rank's parts of every batch."""
    workload = get_workload("graphmamba")
    team = Team(dist.get_rank(group), dist.get_world_size(group), torch.device("cpu"), "ddp")
    return [*make_batches(run, workload, workload.dataset(run), 0, team)]


@needs_graphs
def test_several_processes_draw_batches_of_one_size(tmp_path):
    """All of them, in order, the last one too."""
    run, workload = small_run("graphmamba", "tiny", buckets=4, batch=4, steps=3), get_workload("graphmamba")
    plain = make_batches(replace(run, buckets=None), workload, workload.dataset(run), 0, make_single())
    started = Ranks(2, tmp_path / "store")
    found = started.run(2, draw_batches, run)
    started.end()
    for whole, *parts in zip(plain, *found, strict=True):
        assert len({tuple((name, t.shape) for name, t in part.items()) for part in parts}) == 1
        torch.testing.assert_close(torch.cat([part["x"][: part["ptr"][-2]] for part in parts]), whole["x"])
