"""Two processes train as one does: the same losses, and checkpoints that another number of them goes on from, in the other way.

Each starts as torchrun would start it; without a GPU some are forked, and have that environment alone.
"""

import shutil
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen, TimeoutExpired

import pytest
import torch
from rich.console import Console
from torch import nn

from experiments import checkpoints, record
from experiments.parallel import Team, _group_layers
from experiments.train import train
from experiments.training_run import make_run
from ssd.block import arguments
from tests.experiments.forked import Forked
from tests.experiments.small import VARIANT, needs_graphs, read_log, read_saved
from tests.experiments.test_train import start_module
from tests.experiments.undrawn import runs_of, train_undrawn, ways_of
from tests.shared import make_once

needs_two = pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() == 1, reason="needs no GPU, or two")
needs_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")  # on CPUs torch syncs no batch norms
SETTINGS = {"workload": "hybrid", "variant": VARIANT, "batch": 4, "seqlen": 32, "accumulate": 2, "steps": 4, "save_every": 2}
_LONGEST_S = 300
start_soon = start_module if torch.cuda.is_available() else Forked
LINE = ["train", *(f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items())]
GRAPHS = ["train", "--workload=graphmamba", f"--variant={VARIANT}", "--mixer=ssd", "--batch=4", "--buckets=1"]


def two() -> list[dict[str, object]]:
    """What torchrun tells two processes."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    return [{"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "localhost", "MASTER_PORT": port,
             "PYTHONFAULTHANDLER": 1} for rank in range(2)]


def collect_output(ranks: list[Popen[str]], status: int = 0) -> list[tuple[str, str]]:
    """What they said until they ended with that status; where one does not end, all are, and the test fails with what they
    were at.
    """
    try:
        said = [process.communicate(timeout=_LONGEST_S) for process in ranks]
    except TimeoutExpired:
        for process in ranks:
            process.send_signal(signal.SIGABRT)
        stacks = [process.communicate()[1] for process in ranks]
        pytest.fail(f"ended by the test's time limit: no end after {_LONGEST_S} s\n" + "\n".join(stacks))
    for rank, process in enumerate(ranks):
        if process.returncode < 0:
            by = signal.Signals(-process.returncode).name
            pytest.fail(f"process {rank} was killed by {by}, as when time or memory is up: {said}")
        assert process.returncode == status, said
    return said


def train_by_two(out: Path, way: str, *more: str, line: list[str] = LINE, start: Callable = start_module) -> None:
    line = [*line, "--out", out, "--rows", out / "rows", "--parallel", way, *more]
    ranks = [start("experiments", *line, **environment) for environment in two()]
    _, (said, _) = collect_output(ranks)
    assert said == "", "the second process speaks, too"


@pytest.fixture(scope="module")
def by_one(tmp_path_factory) -> Path:
    """The run, taken by one process."""
    return make_once(tmp_path_factory, "one", train_alone)


def train_alone(out: Path, resume: bool = False) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "INTERPRETED", False)
        train(make_run(**SETTINGS), out, Console(quiet=True), resume, out / "rows")


def assert_same_steps(out: Path, by_one: Path) -> None:
    """But for the order in which sums are taken."""
    for value in ("loss", "grad_norm"):  # clipping and AdamW hide how large a gradient was
        assert read_log(out, value) == pytest.approx(read_log(by_one, value), rel=1e-3), out


def load_saved(out: Path) -> dict[str, torch.Tensor]:
    """Weights and buffers."""
    return {name: t for name, t in read_saved(out).items() if "/" not in name}


def assert_ends_alike(out: Path, by_one: Path) -> None:
    assert_same_steps(out, by_one)
    weights, expected = load_saved(out), load_saved(by_one)
    assert weights.keys() == expected.keys()
    for name, t in weights.items():
        apart = (t - expected[name]).norm() / expected[name].norm()
        assert apart < 1e-2, f"{name}: {apart}"


@needs_two
def test_two_whole_models(by_one, tmp_path):
    train_by_two(tmp_path, "ddp")
    assert_ends_alike(tmp_path, by_one)
    (row,) = record.read(tmp_path / "rows")
    assert (row["gpus"], row["way"]) == (2, "ddp") and (row["link_gbps"] is None) != torch.cuda.is_available()
    # and one goes on with what two have saved
    shutil.rmtree(tmp_path / "checkpoints" / "step-00000004")
    train_alone(tmp_path, resume=True)
    assert_ends_alike(tmp_path, by_one)


@needs_gpus
@pytest.mark.parametrize("line", [LINE, pytest.param(GRAPHS, marks=needs_graphs)], ids=("tokens", "graphs"))
def test_two_captured(line, tmp_path):
    """The steps of two processes, with what they exchange, in CUDA graphs and without; batches of graphs differ in size."""
    long = "--steps=24", "--save-every=24"
    train_by_two(tmp_path / "eager", "ddp", "--no-graph", *long, line=line)
    train_by_two(tmp_path / "graph", "ddp", "--graph", *long, line=line)
    assert_same_steps(tmp_path / "graph", tmp_path / "eager")


@needs_gpus
def test_fifty_steps_of_a_published_size_by_parts(tmp_path):
    """Each GPU has half of every sequence.

    The first loss tells whether they compute the same. What comes later drifts, as on one GPU, where another variant rounds
    otherwise and torch's attention adds gradients in no fixed order (docs/log/several-gpus.md).
    """
    line = ("train", "--workload=hybrid", "--preset=1b", "--batch=1", "--seqlen=8192", "--steps=50", "--dtype=bf16",
            "--save-every=0", "--rows", tmp_path)
    for name, variant in (("one", "auto"), ("other", "baseline")):
        collect_output([start_module("experiments", *line, "--variant", variant, "--out", tmp_path / name)])
    collect_output([start_module("experiments", *line, "--out", tmp_path / "two", "--parallel", "cp", **environment)
                    for environment in two()])
    apart, drift = ([abs(loss / expected - 1) for loss, expected
                     in zip(read_log(tmp_path / name), read_log(tmp_path / "one"), strict=True)] for name in ("two", "other"))
    assert len(apart) == 50 and apart[0] < 5e-5 and max(apart) < max(1e-3, 3 * max(drift)), (apart, drift)


@needs_two
@pytest.mark.parametrize("way", ["fsdp", "cp"])
def test_two_go_on_with_what_one_has_saved(way, by_one, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(by_one, out)
    shutil.rmtree(out / "checkpoints" / "step-00000004")
    train_by_two(out, way, "--resume", start=start_soon)
    assert_ends_alike(out, by_one)


@needs_two
@pytest.mark.slow
@pytest.mark.parametrize("workload", [  # hybrid has mamba2's layers beside its own
    "hybrid", *(pytest.param(name, marks=needs_gpus) for name in ("mamba2", "mambavision")),
    pytest.param("graphmamba", marks=[needs_graphs, needs_gpus])])
def test_every_workload_in_either_way(workload, tmp_path):
    """Not by its weights: biases before a batch norm have gradients of rounding alone, of which AdamW makes whole steps."""
    train_undrawn(workload, tmp_path / "one", "ddp")
    ranks = [start_soon("tests.experiments.undrawn", workload, tmp_path / "two", **environment) for environment in two()]
    collect_output(ranks)
    for way in ways_of(workload):
        for name in runs_of(workload):
            out, by_one = tmp_path / "two" / way / name, tmp_path / "one" / "ddp" / name
            assert_same_steps(out, by_one)
            expected = load_saved(by_one)
            for batch_norm, t in load_saved(out).items():
                if batch_norm.endswith(("num_batches_tracked", "running_var")):
                    torch.testing.assert_close(t, expected[batch_norm], rtol=1e-2, atol=0)


@pytest.mark.parametrize("way, changed, said", [
    ("ddp", {"batch": 3}, "--batch: got 3, expected a multiple of 2"),
    ("cp", {"workload": "mambavision"}, "--parallel: got cp with the workload mambavision, expected mamba2 or hybrid"),
    ("cp", {"workload": "hybrid", "seqlen": 33}, "--seqlen: got 33, expected a multiple of 2"),
    ("cp-fsdp", {"compile": True}, "--compile: got it with --parallel cp-fsdp"),
    ("cp", {"variant": "fla"}, "--variant: got 'fla' with --parallel cp"),
], ids=("batch", "workload", "seqlen", "compile", "variant"))
def test_runs_that_cannot_be_dealt_out(way, changed, said):
    with pytest.raises(ValueError, match=said):
        Team(0, 2, torch.device("cpu"), way).check(make_run(**{"workload": "mamba2"} | changed))


def test_more_gpus_than_heads_of_keys():
    with pytest.raises(ValueError, match="--parallel: got cp on 3 GPUs with 2 heads of keys"):
        Team(0, 3, torch.device("cpu"), "cp").check(make_run("hybrid"))


@needs_two
def test_a_signal_to_all_processes_saves(tmp_path):
    """Twice, as from a scheduler and from torchrun."""
    line = (*LINE, "--steps", 1000, "--save-every", 0, "--out", tmp_path)
    ranks = [start_soon("experiments", *line, **environment) for environment in two()]
    until = time.monotonic() + _LONGEST_S
    while not (tmp_path / "log.jsonl").exists() and ranks[0].poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    for _ in range(2):
        for rank in ranks:
            rank.terminate()
    said = collect_output(ranks, 128 + signal.SIGTERM)
    step = checkpoints.read_state(checkpoints.latest(tmp_path / "checkpoints"))["step"]
    assert f"SIGTERM after step {step}" in said[0][0] and said[1][0] == "" and len(read_log(tmp_path)) == step


def test_layers_are_gathered_in_groups_of_a_size():
    layers = nn.ModuleList(nn.Linear(n, 2**20, bias=False, device="meta") for n in (100, 100, 56, 1, 300, 5))
    assert [[layer.in_features for layer in group] for group in _group_layers(layers)] == [[100, 100, 56], [1], [300], [5]]
    assert list(_group_layers(nn.ModuleList())) == []
