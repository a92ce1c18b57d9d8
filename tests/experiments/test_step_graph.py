"""Captured steps: the bits of those launch by launch, whatever is drawn, and of runs that go on; what waits; refusals.

On a CPU the stand-in for a graph runs what it captured again.
"""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from experiments import step_graph
from experiments import train as training
from experiments.parallel import Team, make_single
from experiments.step_graph import CapturedStep, choose, explain_refusal
from experiments.step_time import Candidate, count_forward_flops, measure_steps
from experiments.train import Stopped, train
from experiments.training_step import Step, build_model, make_batches
from experiments.workloads import get_workload
from ssd.modules import captured
from tests.experiments.small import needs_graphs, read_log, small_run
from tests.experiments.test_train import QUIET, REPEATING, assert_same, before_step, interrupt

pytestmark = pytest.mark.usefixtures("small")
GRAPHS = {"buckets": 1, "checkpoint_activations": True}, {"buckets": 1, "mixer": "mamba1", "variant": "auto"}
CAPTURED = [("mamba2", {"checkpoint_activations": True}), ("mamba2", {"optimizer": "lamb"}), ("hybrid", {}),
            ("mambavision", {}), *(pytest.param("graphmamba", settings, marks=needs_graphs) for settings in GRAPHS)]
aten = torch.ops.aten
# what waits for a GPU: a number or a shape made of values, and what is made of numbers of the host
WAITING = {aten._local_scalar_dense, aten.nonzero, aten.bincount, aten.masked_select, aten.lift_fresh, aten.unique_consecutive,
           aten._unique2, aten.repeat_interleave, aten.equal, aten.is_nonzero}


class Refuse(TorchDispatchMode):
    """Refuses operations that a CUDA graph cannot hold."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func.overloadpacket not in WAITING, f"{func} waits for the GPU"
        masks = (t for t in (args[1] if func.overloadpacket in (aten.index, aten.index_put) else ()) if t is not None)
        assert not any(t.dtype == torch.bool for t in masks), "a mask as an index makes a shape of values"
        return func(*args, **kwargs or {})


@pytest.fixture
def captures(monkeypatch, device) -> list:
    """What was captured, in turn."""
    found, capture = [], captured.capture

    def record(run, on, pool):
        found.append(run)
        return capture(run, on, pool) if device == "cuda" else (run, None)

    monkeypatch.setattr(step_graph, "capture", record)
    if device == "cpu":
        monkeypatch.setattr(step_graph, "warm_up", lambda run, _: run())
        monkeypatch.setattr(step_graph, "explain_refusal", lambda *_: None)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 0))
        # on a CPU the optimizer of a captured step is another kernel
        monkeypatch.setattr(training, "build_model", lambda run, workload, team, *_: build_model(run, workload, team, True))
    return found


def prepare(run, kind: type[Step]) -> tuple[Step, object]:
    workload, team = get_workload(run.workload), make_single()
    model, optimizer, _ = build_model(run, workload, team, True)
    return kind(run, workload, model, optimizer, team), make_batches(run, workload, workload.dataset(run), 0, team)


@pytest.mark.parametrize("workload, settings", CAPTURED, ids=str)
def test_nothing_is_read_in_what_is_captured(workload, settings, monkeypatch):
    monkeypatch.setattr(torch, "get_rng_state", lambda: pytest.fail("a generator's state cannot be read"))
    take, batches = prepare(small_run(workload, **settings), Step)
    take(1, batches)
    batch = take.prepare(next(batches))
    with Refuse():
        take.add_gradient(batch, 0)
        take.finish()
    assert take.loss.isfinite() and take.norm > 0


def test_what_is_read_would_be_found():
    for read in (lambda t: t.sum().item(), lambda t: t[t > 0], lambda t: torch.tensor([1.0]) + t, lambda t: t.nonzero()):
        with pytest.raises(AssertionError), Refuse():
            read(torch.ones(3))


@pytest.mark.parametrize("workload, settings", [
    *CAPTURED, ("mamba2", {"accumulate": 3, "dtype": "bf16"})], ids=str)
def test_losses_are_those_launch_by_launch(tmp_path, captures, workload, settings):
    """In bits, but where the eager ones do not repeat theirs."""
    run = small_run(workload, **{"steps": 20 if torch.cuda.is_available() else 5} | settings)
    rows = [train(run, tmp_path / way, QUIET, rows=tmp_path, graph=way == "graph") for way in ("eager", "graph")]
    assert [row["graph"] for row in rows] == [False, True]
    assert len(captures) >= 2 if run.buckets else len(captures) == (2 if run.accumulate == 1 else 3)
    if workload in REPEATING:
        return assert_same(tmp_path / "eager", tmp_path / "graph")
    losses, expected = (read_log(tmp_path / way) for way in ("graph", "eager"))
    assert losses[:3] == pytest.approx(expected[:3], rel=1e-5) and losses == pytest.approx(expected, rel=1e-2)


@pytest.mark.parametrize("first", [False, True])
def test_a_run_goes_on_in_either_way(tmp_path, captures, monkeypatch, first):
    run = small_run()
    train(run, tmp_path / "whole", QUIET, rows=tmp_path, graph=True)
    interrupt(run, tmp_path / "parts", 4, graph=first)
    assert len(read_log(tmp_path / "parts")) == 4, "what is in flight is logged before it is saved"
    train(run, tmp_path / "parts", QUIET, resume=True, rows=tmp_path, graph=not first)
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_the_first_capture_makes_the_gradients(captures, monkeypatch):
    """Where shapes differ as well: gradients from outside of the graphs' memory are freed by another candidate's steps."""
    take, batches = prepare(small_run(), CapturedStep)
    long, missing, capture = next(batches), [], step_graph.capture

    def record(*given):
        missing.append(all(parameter.grad is None for parameter in take.model.parameters()))
        return capture(*given)

    monkeypatch.setattr(step_graph, "capture", record)
    short = {name: t[:, : t.shape[1] // 2].contiguous() for name, t in long.items()}
    for number in range(8):
        take(1 + number, iter([(long, short)[number % 2]]))
    assert missing == [True, False, False]


class Dropping(nn.Module):
    """Its loss says what was dropped."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4096))

    def forward(self) -> torch.Tensor:
        return (F.dropout(self.weight, 0.5) * torch.arange(4096, device=self.weight.device)).mean()


def test_replays_draw_what_the_seed_says(captures):
    """Also after numbers that are drawn between a step's seed and its replays."""
    workload, team = replace(get_workload("mamba2"), loss=lambda model, _: model(), terms=None,
                             prepare=lambda model, batch: {"x": torch.rand(2, device=model.weight.device)}), make_single()
    losses = []
    for kind in (Step, CapturedStep):
        model = Dropping().to(team.device)
        optimizer = torch.optim.AdamW(model.parameters(), torch.tensor(0.0, device=team.device), fused=True, capturable=True)
        take = kind(small_run("mamba2", accumulate=2, lr=1e-30), workload, model, optimizer, team)
        losses.append([take(number, iter([{}] * 2)).tolist() for number in (*range(1, 7), 6)])
    assert losses[0] == losses[1] and losses[0][-1] == losses[0][-2] and len({loss for loss, _ in losses[0]}) == 6
    assert len(captures) == 3


def test_batches_of_another_shape_have_graphs_of_their_own(captures):
    run = small_run("mamba2", steps=12)
    taken = []
    for kind in (Step, CapturedStep):
        take, batches = prepare(run, kind)
        found = [take(n, iter([{name: t[: 2 + n % 2] for name, t in next(batches).items()}])).tolist() for n in range(1, 13)]
        taken.append((found, take.model.state_dict()))
    (eager, weights), (captured, others) = taken
    assert eager == captured and all(torch.equal(t, others[name]) for name, t in weights.items())
    assert len(captures) == 3, "two gradients, and what uses either"


def test_a_loss_that_is_not_finite_is_read_late_but_saved_nowhere(tmp_path, captures, monkeypatch):
    factor = torch.ones((), device=make_single().device)
    original = get_workload("mamba2")
    broken = replace(original, loss=lambda *given: original.loss(*given) * factor)
    monkeypatch.setattr(training, "get_workload", lambda name: broken)
    before_step(monkeypatch, 4, lambda: factor.fill_(math.nan))
    with pytest.raises(Stopped, match=r"step 4: the loss is nan; try a lower --lr.* last good checkpoint is .*step-00000002"):
        train(small_run(save_every=2), tmp_path, QUIET, graph=True)
    assert len(read_log(tmp_path)) == 3 and not (tmp_path / "checkpoints" / "step-00000004").exists()


def test_what_cannot_be_captured_is_said(tmp_path, captures, monkeypatch):
    def fail(*_):
        raise RuntimeError("operation not permitted when stream is capturing\nat line 3")

    monkeypatch.setattr(step_graph, "capture", fail)
    said = r"--graph: a step of mamba2 small with variant \w+ cannot be captured: operation not .*; expected --no-graph"
    with pytest.raises(Stopped, match=said):
        train(small_run(), tmp_path, QUIET, graph=True)


@pytest.mark.parametrize("settings, size, said", [
    ({}, 2, "steps of 2 processes are captured with --parallel ddp alone, got fsdp"),
    ({"variant": "fla"}, 1, "got --variant fla, which asks the GPU where documents end"),
    ({"workload": "graphmamba"}, 1, "batches of graphs differ in their sizes without --buckets"),
    ({"workload": "mambavision", "checkpoint_activations": True}, 1, "with --checkpoint-activations the backward restores"),
    ], ids=str)
def test_refusals(settings, size, said):
    run = small_run(**settings)
    assert explain_refusal(run, Team(0, size, torch.device("cuda"), "fsdp")).startswith(said)
    assert explain_refusal(run, Team(0, 1, torch.device("cpu"), "ddp")) == "a CUDA graph needs a GPU, found none"
    assert all(explain_refusal(small_run(), Team(0, n, torch.device("cuda"), "ddp")) is None for n in (1, 2))


def test_steps_are_captured_where_all_can_be(capsys):
    """Unless it is said whether; and why they are not is said where it may surprise."""
    gpu, cpu = (Team(0, 1, torch.device(kind), "ddp") for kind in ("cuda", "cpu"))
    able, unable = small_run(), small_run("graphmamba")
    console = Console(width=200)
    assert choose(None, [able], gpu, console) and not choose(None, [able], cpu, console)
    assert not choose(False, [able], gpu, console)
    assert capsys.readouterr().out == ""
    assert not choose(None, [able, unable], gpu, console)
    assert "kernel by kernel: batches of graphs differ in their sizes without --buckets" in capsys.readouterr().out
    with pytest.raises(ValueError, match="--graph: a CUDA graph needs a GPU, found none; expected --no-graph"):
        choose(True, [able], cpu, console)


def test_the_flops_of_a_model_are_those_of_its_weights():
    """Two for each weight of a matrix and token, but the embedding's; the SSD's are not in it."""
    run = small_run()
    take, batches = prepare(run, Step)
    weights = sum(p.numel() for name, p in take.model.named_parameters()
                  if p.dim() == 2 and name != "embedding.weight")
    assert count_forward_flops(run, take.workload, take.model, next(batches)) == 2 * weights * run.units


def test_steps_are_timed(captures, monkeypatch, device):
    monkeypatch.setattr("experiments.step_time.build_model", training.build_model)
    candidates = [Candidate("torch"), Candidate("auto")]
    rows = measure_steps(small_run(steps=1), candidates, 2, 1, QUIET, graph=True)
    assert [rows[candidate]["graph"] for candidate in candidates] == [True, True] and len(captures) == 4
    assert all(0 < row["host_us"] <= row["p80_us"] for row in rows.values())
    if device == "cuda":
        assert all(0 <= row["idle_pct"] < 100 and row["tflops"] > 0 for row in rows.values())
