"""Training: the loss falls, a run that was interrupted ends as one that was not, and what stops a run costs nothing."""

import errno
import io
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console

from experiments import checkpoints, record
from experiments import train as training
from experiments.files import hold_folder
from experiments.shards import AdamW
from experiments.train import Interrupted, Stopped, train
from experiments.training_run import Run
from experiments.training_step import Step, compute_learning_rate
from experiments.workloads import get_workload
from tests.experiments.invoke import invoke
from tests.experiments.small import read_log, read_saved, small_run

pytestmark = pytest.mark.usefixtures("small")
QUIET = Console(quiet=True)
# torch's attention on a GPU does not repeat its gradients' bits
REPEATING = ["mamba2"] if torch.cuda.is_available() else ["mamba2", "hybrid", "mambavision"]
REPEATING += ["graphmamba"] if find_spec("torch_geometric") else []


TENSORS = "shard-00001-model-00001-of-00001.safetensors"


def assert_same(out: Path, other: Path):
    assert read_log(out) == read_log(other)
    ours, theirs = read_saved(out), read_saved(other)
    assert ours.keys() == theirs.keys() and all(torch.equal(t, theirs[name]) for name, t in ours.items())


def before_step(monkeypatch, number: int, act: Callable[[], None]):
    """Something happens at the beginning of a step."""
    original = Step.begin

    def begin(self, n):
        if n == number:
            act()
        original(self, n)

    monkeypatch.setattr(Step, "begin", begin)


def start_module(module: str, *arguments: object, **variables: object) -> subprocess.Popen[str]:
    """A module run in a process of its own, where nothing interprets kernels; variables: of its environment, besides."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    environment |= {name: str(value) for name, value in variables.items()}
    line = [sys.executable, "-m", module, *map(str, arguments)]
    return subprocess.Popen(line, cwd=Path(__file__).parents[2], env=environment, text=True, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE)


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_lost_terminal_is_no_lost_run(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted, match="SIGHUP after step 2, which is saved"):
        before_step(patch, 2, lambda: os.kill(os.getpid(), signal.SIGHUP))
        train(small_run(steps=3), tmp_path / "run", QUIET)
    signal.signal(signal.SIGHUP, before)


def interrupt(run: Run, out: Path, step: int, **given):
    """Trains until a signal comes at that step."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Interrupted, match=f"after step {step}, which is saved"):
        before_step(patch, step, terminate)
        train(run, out, QUIET, **given)


@pytest.mark.parametrize("workload", ["mamba2", "hybrid"])
def test_the_loss_falls_by_more_than_a_nat(tmp_path, workload):
    run = small_run(workload, steps=40)
    row = train(run, tmp_path / "run", QUIET, rows=tmp_path / "rows")
    assert row["first_loss"] == pytest.approx(math.log(256), abs=0.1)
    assert row["floor"] < row["loss"] < row["first_loss"] - 1
    assert record.read(tmp_path / "rows") == [row] and row["run"] == asdict(run)
    assert json.loads((tmp_path / "run" / "run.json").read_text()) == asdict(run)
    assert row["units_per_s"] > 0 and row["unit"] == "tokens" and row["peak_mib"] > 0


@pytest.mark.parametrize("mixer", ["mamba1", "ssd"])
def test_images_are_told_apart_by_a_nat_more(tmp_path, mixer):
    variant = {"variant": "auto"} if mixer == "mamba1" else {}  # whose scan is no SSD
    row = train(small_run("mambavision", mixer=mixer, steps=30, **variant), tmp_path / "run", QUIET, rows=tmp_path / "rows")
    assert row["first_loss"] == pytest.approx(math.log(10), abs=0.1)
    assert row["floor"] < row["loss"] < row["first_loss"] - 1
    assert row["unit"] == "images" and row["run"]["mixer"] == mixer


@pytest.mark.parametrize(("settings", "workload"), [
    *(({}, workload) for workload in REPEATING if workload != "mamba2"), ({"dtype": "bf16"}, "mamba2"),
    ({"accumulate": 2, "checkpoint_activations": True}, "mamba2")], ids=str)
def test_a_resumed_run_ends_with_the_same_bits(tmp_path, monkeypatch, workload, settings):
    run = small_run(workload, **settings)
    train(run, tmp_path / "whole", QUIET, rows=tmp_path / "rows")
    before_step(monkeypatch, 4, terminate)
    with pytest.raises(Interrupted, match=r"SIGTERM after step 4, which is saved; .* --resume"):
        train(run, tmp_path / "parts", QUIET, rows=tmp_path / "rows")
    assert len(read_log(tmp_path / "parts")) == 4 and len(record.read(tmp_path / "rows")) == 1
    train(run, tmp_path / "parts", QUIET, resume=True, rows=tmp_path / "rows")
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_a_row_says_how_long_steps_waited_for_data(tmp_path, monkeypatch):
    def make_late(*given):
        for batch in make_batches(*given):
            time.sleep(0.5)
            yield batch

    make_batches = training.make_batches
    quick = train(small_run(steps=3), tmp_path / "quick", QUIET, rows=tmp_path)
    monkeypatch.setattr(training, "make_batches", make_late)
    slow = train(small_run(steps=3), tmp_path / "slow", QUIET, rows=tmp_path)
    assert 0 <= quick["data_pct"] < 50 < slow["data_pct"] <= 100


def test_a_killed_run_takes_its_unsaved_steps_again(tmp_path, monkeypatch):
    run = small_run(save_every=2)
    train(run, tmp_path / "whole", QUIET, rows=tmp_path / "rows")
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError):
        before_step(patch, 4, Mock(side_effect=ZeroDivisionError))
        train(run, tmp_path / "parts", QUIET)
    with (tmp_path / "parts" / "log.jsonl").open("a") as log:
        log.write('{"step": 4, "lo')
    train(run, tmp_path / "parts", QUIET, resume=True, rows=tmp_path / "rows")
    assert_same(tmp_path / "whole", tmp_path / "parts")
    assert [path.name for path in (tmp_path / "parts" / "checkpoints").iterdir()] == ["step-00000004", "step-00000006"]


def test_other_data_than_those_it_began_with_are_refused(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("one two three " * 50)
    run = small_run(data=str(tmp_path / "texts"), save_every=2)
    interrupt(run, tmp_path / "run", 3)
    (tmp_path / "texts" / "b.txt").write_text("four five six " * 50)
    with pytest.raises(ValueError, match=r"--data: got 21 samples in .*texts, expected 10, with which the run began"):
        train(run, tmp_path / "run", QUIET, resume=True)
    (tmp_path / "texts" / "b.txt").unlink()
    train(run, tmp_path / "run", QUIET, resume=True, rows=tmp_path)


@pytest.mark.parametrize("content", ["", '{"step": 1, "loss": 5.0}\n{"st', '{"step": 2, "loss": 5.0}\n' * 2, "[1]\n[2]\n"])
def test_a_damaged_log_is_refused(tmp_path, content):
    interrupt(small_run(), tmp_path, 2)
    (tmp_path / "log.jsonl").write_text(content)
    with pytest.raises(ValueError, match=r"log\.jsonl: expected a line for each of the 2 steps"):
        train(small_run(), tmp_path, QUIET, resume=True)
    assert (tmp_path / "log.jsonl").read_text() == content


def test_signals_are_noted_again_after_a_step_that_took_their_handlers(tmp_path, monkeypatch):
    """As LLVM's take their place when it compiles its first kernel."""
    with monkeypatch.context() as patch, pytest.raises(Interrupted, match="after step 3"):
        before_step(patch, 2, lambda: signal.signal(signal.SIGTERM, signal.SIG_IGN))
        before_step(patch, 3, terminate)
        train(small_run(save_every=0), tmp_path, QUIET)


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, monkeypatch):
    run = small_run(save_every=2)

    original, factors = get_workload("mamba2"), iter([1, 1, 1, math.nan])
    broken = replace(original, loss=lambda *given: original.loss(*given) * next(factors))
    monkeypatch.setattr(training, "get_workload", lambda name: broken)
    with pytest.raises(Stopped, match=r"step 4: the loss is nan; try a lower --lr.* last good checkpoint is .*step-00000002"):
        train(run, tmp_path, QUIET)
    assert all(t.isfinite().all() for t in read_saved(tmp_path).values()) and len(read_log(tmp_path)) == 3


def test_one_run_at_a_time_has_a_folder(tmp_path, monkeypatch):
    """Another that begins there, or goes on there, is refused before it writes."""
    run, out = small_run(save_every=2), tmp_path / "run"

    def intrude(said: str, **how):
        with pytest.raises(FileExistsError, match=said):
            train(replace(run, lr=0.1), out, QUIET, **how)

    with monkeypatch.context() as patch:
        before_step(patch, 2, lambda: intrude("--out: got .*, where a run ended before it was saved"))
        train(run, out, QUIET, rows=tmp_path)
    shutil.rmtree(out / "checkpoints")
    (out / "log.jsonl").unlink()
    with monkeypatch.context() as patch:  # both found the folder empty
        before_step(patch, 1, lambda: (patch.undo(), train(run, out, QUIET, rows=tmp_path)))
        intrude("where another run has begun meanwhile")
    assert json.loads((out / "run.json").read_text())["lr"] == run.lr and len(read_log(out)) == run.steps
    held = hold_folder(out)
    shutil.rmtree(out / "checkpoints" / "step-00000006")
    with pytest.raises(FileExistsError, match="where another process trains"):
        train(run, out, QUIET, resume=True)
    os.close(held)
    assert len(train(run, out, QUIET, resume=True, rows=tmp_path)["run"]) and len(read_log(out)) == run.steps


def test_a_row_that_does_not_fit_the_disk(tmp_path, monkeypatch):
    monkeypatch.setattr(record, "append", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(Stopped, match=r"saved in .*, but its row could not be written to .*\. It is {\"bench\": \"tr"):
        train(small_run(), tmp_path, QUIET)


def test_a_checkpoint_that_does_not_fit_the_disk(tmp_path, monkeypatch):
    """The step, the folder, and from where the run goes on."""
    save = checkpoints.save

    def fill(folder, step, *given):
        if step == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        return save(folder, step, *given)

    monkeypatch.setattr(checkpoints, "save", fill)
    with pytest.raises(Stopped, match=r"step 4: its checkpoint could not be written to .*: .*No space left.*"
                                      r"The last good one is .*step-00000002, from which --resume goes on"):
        train(small_run(save_every=2), tmp_path, QUIET)


@pytest.mark.parametrize("file", [TENSORS, "state.json", "SHA256SUMS"])
def test_a_damaged_checkpoint_is_said_and_the_one_before_it_used(tmp_path, file):
    """The run then ends as one that was not interrupted; with none that is whole it does not go on."""
    run, said = small_run(steps=6, save_every=2), io.StringIO()
    train(run, tmp_path / "whole", QUIET, rows=tmp_path / "rows")
    interrupt(run, tmp_path / "parts", 5)
    last = checkpoints.latest(tmp_path / "parts" / "checkpoints")
    content = bytearray((last / file).read_bytes())
    content[-len(content) // 3] ^= 1
    (last / file).write_bytes(content)
    train(run, tmp_path / "parts", Console(file=said), resume=True, rows=tmp_path / "rows")
    first = said.getvalue().splitlines()[0]
    assert first.startswith(f"{last}{os.sep}") and "cannot be read (" in first
    assert first.endswith(f": the run goes on from {last.with_name('step-00000004')}, and takes the steps after 4 again")
    assert_same(tmp_path / "whole", tmp_path / "parts")


def test_without_a_good_checkpoint_a_run_does_not_go_on(tmp_path):
    interrupt(small_run(save_every=2), tmp_path, 5)
    for checkpoint in (tmp_path / "checkpoints").iterdir():
        (checkpoint / TENSORS).write_bytes(b"")
    with pytest.raises(ValueError, match=r"--resume: got --out .*, expected a checkpoint in it that can be read; "
                                         r".*step-00000005.*; .*step-00000004.*shard-.*\.safetensors: cannot be read"):
        train(small_run(save_every=2), tmp_path, QUIET, resume=True)


@pytest.mark.parametrize(
    "place", [(Step, "add_gradient"), (AdamW, "step"), (training, "build_model")], ids=str)
def test_what_does_not_fit_the_memory_is_said_in_terms_of_the_run(tmp_path, monkeypatch, place):
    monkeypatch.setattr(*place, Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))
    with pytest.raises(Stopped, match=r"--batch: 4 rows of 64 tokens of mamba2 small do not fit .*; expected fewer"):
        train(small_run(), tmp_path / "run", QUIET)
    assert not (tmp_path / "run").exists()


def test_the_command_line(tmp_path):
    given = ("train", "--preset", "small", "--variant", "torch", "--steps", "2", "--out", tmp_path / "run",
             "--rows", tmp_path / "rows")
    result = invoke(*given)
    assert result.exit_code == 0, result.stderr
    assert "2/2" in result.stdout and "no model gets below a loss of" in result.stdout
    again = invoke(*given)
    assert again.exit_code == 2 and again.stderr == (
        f"error: --out: got {tmp_path / 'run'}, which has a run in it, expected another folder, or --resume to go on\n")
    finished = invoke(*given, "--resume")
    assert finished.exit_code == 2 and finished.stderr.endswith("has taken all its 2 steps\n")
    other = invoke(*given, "--resume", "--weight-decay", "0.2")
    assert other.exit_code == 2
    assert other.stderr == (f"error: --weight-decay: got 0.2, expected 0.1, with which the run in {tmp_path / 'run'} began; "
                            "remove that folder to begin anew\n")
    assert len(read_log(tmp_path / "run")) == 2 and len(record.read(tmp_path / "rows")) == 1
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    assert "where a run ended before it was saved, expected another folder, or that it is removed" in invoke(*given).stderr
    assert "remove its folder and start anew" in invoke(*given, "--resume").stderr


def test_the_learning_rate():
    run = small_run(steps=100, warmup=10, lr=1.0)
    rates = [compute_learning_rate(run, step) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([n / 10 for n in range(1, 11)])
    assert rates[9:] == sorted(rates[9:], reverse=True) and rates[-1] == pytest.approx(0.1)
    assert rates[54] == pytest.approx(0.55)
    assert compute_learning_rate(replace(run, warmup=100), 100) == 1.0


def test_what_cannot_train_here_says_so_before_there_is_a_model(tmp_path, monkeypatch):
    """A variant that does not take such calls, and one whose package is missing."""
    monkeypatch.setattr(training, "build_model", lambda *_: pytest.fail("a model was built"))
    monkeypatch.setattr(training, "get_variant", lambda name: SimpleNamespace(supports=lambda inputs: "it needs a GPU"))
    with pytest.raises(ValueError, match="--variant: 'fused' cannot train mamba2 small here: it needs a GPU"):
        train(small_run(variant="fused"), tmp_path / "run", QUIET)
    monkeypatch.setattr(training, "get_variant", Mock(side_effect=ImportError("fla is not installed")))
    with pytest.raises(ImportError, match="fla is not installed"):
        train(small_run(variant="fla"), tmp_path / "run", QUIET)
    assert not (tmp_path / "run").exists()
