"""Trains a workload, step by step, and leaves in the run's folder what it takes to go on exactly.

A step depends on the run and on what a checkpoint holds, alone. So a run that was interrupted ends with the bits of one that
was not, wherever the model's kernels give the same bits twice (torch's attention on a GPU does not, in its backward).
"""

import json
import math
import resource
import signal
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor, nn

from ssd.modules.checkpoint import import_safetensors
from ssd.registry import get_variant
from ssd.types import SSDInputs

from . import checkpoints, record, step_graph
from .files import replace_file
from .inputs import make_inputs
from .parallel import Team, join_team
from .shapes import SMALL, Shape
from .terminal import first_line
from .train_log import TrainLog
from .training_run import Run, option
from .training_step import Step, build_model, compile_layers, compute_learning_rate, make_batches, send, unwrap
from .workloads import get_workload
from .workloads.language_model import ATTENTION
from .workloads.mamba1 import choose_scan


class Stopped(RuntimeError):
    """A run that cannot go on; the message says why and what to do."""


class Interrupted(Exception):
    """A run that a signal ended, after it was saved."""

    def __init__(self, number: signal.Signals, step: int):
        self.number, self.saved = number, f"{number.name} after step {step}, which is saved"
        super().__init__(f"{self.saved}; the same command with --resume goes on")


def train(run: Run, out: Path, console: Console, resume: bool = False, rows: Path | None = None, way: str = "ddp",
          graph: bool | None = False) -> dict[str, Any]:
    """Trains to the last step, saves and appends a row; with other processes, if torchrun started this one with some.

    Args:
        run: what is trained, and how.
        out: the run's folder: run.json, log.jsonl, checkpoints/.
        resume: go on from the last checkpoint in `out`; else there must be no run in it.
        rows: folder of the row; unless given the results with a GPU, `out` without.
        way: of several processes, see `parallel`; a run may go on with another number of them, and in the other way.
        graph: replay steps as CUDA graphs, see `step_graph`; None: where they can be. The bits are the same, so that a run may
            go on with or without.

    Returns:
        The row. Its loss is the mean of the last tenth of the steps, its times those of the steps but the first.

    Raises:
        FileExistsError, FileNotFoundError, ValueError, OSError: settings, data and files, by name; nothing was overwritten.
        ImportError: the package safetensors is missing.
        Stopped: the loss or a weight is not finite, or memory does not suffice; checkpoints are as they were.
        Interrupted: by SIGTERM, SIGINT or SIGHUP. It finished the step and saved.
    """
    with join_team(way) as team:
        team.check(run)
        end = _run_steps(run, out, console if team.rank == 0 else Console(quiet=True), resume, rows, team, graph)
    if isinstance(end, Interrupted):  # not within, which the processes then would not leave together
        raise end
    return end


def _run_steps(run: Run, out: Path, console: Console, resume: bool, rows: Path | None, team: Team,
             graph: bool | None) -> dict[str, Any] | Interrupted:
    workload, saves, first = get_workload(run.workload), out / "checkpoints", team.rank == 0
    last = _check_folder(run, out, resume, console)
    _check_variant(run, team.device)
    graph = step_graph.choose(graph, [run], team, console)
    with team.take_turns(), _explain_errors(run, team.device):
        dataset = workload.dataset(run)
    if last is not None:
        _check_same_data(checkpoints.read_state(last), dataset.samples, run.data)
    with _explain_errors(run, team.device):
        model, optimizer, parameters = build_model(run, workload, team, graph)
        done = 0 if last is None else checkpoints.restore(last, unwrap(model), optimizer)
        if run.compile:
            compile_layers(model)
    where = f"{team.device}" if team.size == 1 else f"{team.size} x {team.device.type} by {team.way}"
    console.print(f"{run.workload} {run.preset}: {parameters:,} parameters, variant {run.variant}, on {where}", markup=False)
    if dataset.floor is not None:
        console.print(f"no model gets below a loss of {dataset.floor:.3f} on these data")

    if team.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(team.device)
    take = (step_graph.CapturedStep if graph else Step)(run, workload, model, optimizer, team)
    times, waits, launched = [], [], deque()
    # closed here, whatever happens: the processes that make batches outlast signals, and this one would wait for them at exit
    with (closing(make_batches(run, workload, dataset, done, team)) as batches,
          TrainLog(out, run.steps, workload.unit, done, console, writes=first) as log,
              _catch_signals(team, console) as interrupted):
        timed = _TimedBatches(batches)
        for step in range(done + 1, run.steps + 1):
            if not launched:
                began = time.perf_counter()
            with _explain_errors(run, team.device):
                launched.append((step, compute_learning_rate(run, step), send(take(step, timed))))
            waits.append(timed.waited)
            number = int(team.max_over(interrupted() or 0))
            is_due = run.save_every and (step % run.save_every == 0 or step == run.steps)
            # the GPU begins with a captured step before what the one before it computed is read
            while len(launched) > (graph and not is_due and not number and step < run.steps):
                of, rate, read = launched.popleft()
                with _explain_errors(run, team.device):
                    loss, norm = read()
                _check_finite(loss, norm, of, saves)
                times.append(-began + (began := time.perf_counter()))
                peak_mib = _measure_peak_mib(team)
                log.step(of, {"loss": loss, "lr": rate, "grad_norm": norm, f"{workload.unit}_per_s": run.units / times[-1],
                              "peak_mib": peak_mib})
                if of == 1 and first:
                    with replace_file(out / "run.json") as part:
                        part.write_text(json.dumps(asdict(run), indent=2) + "\n")
            if is_due or number:
                log.flush()
                with _explain_errors(run, team.device):
                    _save(saves, step, run, model, optimizer, dataset.samples)
            if number and step < run.steps:
                return Interrupted(signal.Signals(number), step)
    cold = min(len(times) // 2 if graph else 1, len(times) - 1)  # the first steps of a captured run are warmed up and captured
    waited = (waits[-1] - (waits[cold - 1] if cold else 0)) / sum(times[cold:])
    row = _make_row(run, workload.unit, log.losses, times[cold:], waited, dataset.floor, parameters, peak_mib, team, graph)
    if first:
        rows = rows or (record.RESULTS if team.device.type == "cuda" else out)
        try:
            record.append(row, rows)
        except OSError as reason:
            raise Stopped(f"the run is saved in {out}, but its row could not be written to {rows}: {first_line(reason)}. It is "
                          f"{json.dumps(row)}") from reason
    loss, speed = f"{row['first_loss']:.3f} to {row['loss']:.3f}", f"{row['units_per_s']:,.0f} {workload.unit}/s"
    console.print(f"loss {loss}, {speed}; all of it is in {out}", markup=False)
    return row


class _TimedBatches:
    """Batches, and how many seconds somebody has waited for them, `waited`."""

    def __init__(self, batches: Iterator[dict[str, Tensor]]):
        self.batches, self.waited = batches, 0.0

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return self

    def __next__(self) -> dict[str, Tensor]:
        began = time.perf_counter()
        try:
            return next(self.batches)
        finally:
            self.waited += time.perf_counter() - began


def check_same_run(run: Run, state: dict[str, Any], out: Path) -> None:
    """Refuses other settings than those of a checkpoint in `out`, whose state this is, by the option's name."""
    for field, now in asdict(run).items():
        if (then := state["run"].get(field)) != now:
            raise ValueError(f"{option(field)}: got {now!r}, expected {then!r}, with which the run in {out} began; remove that "
                             "folder to begin anew")


def _check_same_data(state: dict[str, Any], samples: int | None, data: str) -> None:
    """Refuses data of another number of samples than a run began with; older checkpoints do not say it."""
    if (then := state.get("samples", samples)) != samples:
        raise ValueError(f"--data: got {samples} samples in {data}, expected {then}, with which the run began")


def _check_variant(run: Run, device: torch.device) -> None:
    """Refuses a variant that cannot run here, before data are read and the model is built.

    Raises:
        ImportError: a package is missing.
        ValueError: the variant cannot run a call of such sizes, dtype and device; the message says why.
    """
    if run.mixer != "ssd":
        choose_scan(run.variant)
    elif run.variant != "auto":
        variant, workload = get_variant(run.variant), get_workload(run.workload)
        problem = workload.scans(run.sizes, 1, 64)[0] if workload.scans else None
        shape = Shape("check", 1, 64, problem.nheads, problem.headdim, problem.dstate, problem.ngroups) if problem else SMALL
        dtype = torch.bfloat16 if run.dtype == "bf16" else torch.float32
        inputs = SSDInputs(**make_inputs(shape, dtype, str(device)), chunk_size=problem.chunk_size if problem else 64)
        if reason := variant.supports(inputs):
            raise ValueError(f"--variant: {run.variant!r} cannot train {run.workload} {run.preset} here: {reason}")


def _check_folder(run: Run, out: Path, resume: bool, console: Console) -> Path | None:
    """The checkpoint to go on from, the last that is not damaged; refused where the folder is not what the run needs."""
    import_safetensors()
    if not resume:
        if checkpoints.latest(out / "checkpoints"):
            raise FileExistsError(f"--out: got {out}, which has a run in it, expected another folder, or --resume to go on")
        if (out / "log.jsonl").exists():
            raise FileExistsError(f"--out: got {out}, where a run ended before it was saved, expected another folder, or that "
                                  "it is removed")
        return None
    last, damaged = checkpoints.latest_good(out / "checkpoints")
    if last is None and damaged:
        raise ValueError(f"--resume: got --out {out}, expected a checkpoint in it that can be read; "
                         + "; ".join(reason.what for reason in damaged))
    if last is None:
        raise FileNotFoundError(f"--resume: got --out {out}, expected a folder with a checkpoint in {out / 'checkpoints'}; "
                                "where a run ended before it was saved, remove its folder and start anew")
    state = checkpoints.read_state(last)
    check_same_run(run, state, out)
    if state["step"] >= run.steps:
        raise ValueError(f"--resume: the run in {out} has taken all its {run.steps} steps")
    for reason in damaged:
        console.print(f"{reason.what}: the run goes on from {last}, and takes the steps after {state['step']} again",
                      markup=False, style="yellow", soft_wrap=True)
    return last


def _check_finite(loss: float, norm: float, step: int, saves: Path) -> None:
    for said, value in (("loss", loss), ("gradient's norm", norm)):
        if not math.isfinite(value):
            raise _explain_divergence(step, f"the {said} is {value}", saves)


def _save(saves: Path, step: int, run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, samples: int | None) -> None:
    try:
        checkpoints.save(saves, step, asdict(run), unwrap(model), optimizer, samples)
    except checkpoints.NotFinite as reason:
        raise _explain_divergence(
            step, f"after it these are not finite, so that they were not saved: {reason}", saves) from reason
    except OSError as reason:
        last, _ = checkpoints.latest_good(saves)
        before = f"The last good one is {last}, from which --resume goes on" if last else "There is none yet"
        raise Stopped(f"step {step}: its checkpoint could not be written to {saves}: {first_line(reason)}. "
                      f"{before}") from reason


def _explain_divergence(step: int, said: str, saves: Path) -> Stopped:
    last, _ = checkpoints.latest_good(saves)
    return Stopped(f"step {step}: {said}; try a lower --lr, a longer --warmup or --dtype fp32. "
                   + (f"The last good checkpoint is {last}" if last else "There is no good checkpoint yet"))


def _list_smaller(run: Run) -> Iterator[str]:
    """What takes less memory than the run does."""
    if run.batch > 1:
        yield "fewer, with a larger --accumulate instead"
    if run.seqlen:
        yield "a shorter --seqlen"
    if run.documents and ATTENTION in getattr(run.sizes, "pattern", ""):
        yield "--no-documents, which saves attention's masks"
    if not run.checkpoint_activations:
        yield "--checkpoint-activations"
    yield "a smaller --preset"


@contextmanager
def _explain_errors(run: Run, device: torch.device) -> Iterator[None]:
    """Says in terms of the run what torch says in its own: that memory does not suffice, or that it cannot compile."""
    try:
        yield
    except Stopped:
        raise
    except step_graph.NotCaptured as error:
        raise Stopped(str(error)) from error
    except (RuntimeError, MemoryError) as error:  # torch.OutOfMemoryError is the first
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "DefaultCPUAllocator" in str(error):
            name = torch.cuda.get_device_name() if device.type == "cuda" else "this machine"
            samples = f"rows of {run.seqlen} tokens" if run.seqlen else "samples"
            raise Stopped(f"--batch: {run.batch} {samples} of {run.workload} {run.preset} do not fit the memory of {name}; "
                          f"expected {'; or '.join(_list_smaller(run))}") from error
        if run.compile:
            raise Stopped(f"--compile: {first_line(error)}; leave it out") from error
        raise


@contextmanager
def _catch_signals(team: Team, console: Console) -> Iterator[Callable[[], signal.Signals | None]]:
    """What came of SIGTERM, SIGINT and SIGHUP, which within end nothing. A second one acts as ever, unless there are other
    processes: those get what is sent to all and what torchrun passes on. What is ignored, as under nohup, still is.

    To be asked after every step: LLVM, which Triton compiles with, puts handlers of its own in place with the first kernel.
    They pass the first signal on, but a second that comes at once ends the process.
    """
    numbers = signal.SIGTERM, signal.SIGINT, signal.SIGHUP
    came, before = [], {number: handler for number in numbers if (handler := signal.getsignal(number)) != signal.SIG_IGN}

    def note(number: int, _frame: object) -> None:
        came.append(signal.Signals(number))
        again = "; a second one ends it now" if team.size == 1 else ""
        console.print(f"{came[0].name}: the run saves after this step, and ends{again}", style="yellow")
        if team.size == 1:
            restore()

    def listen() -> None:
        for number in before:
            signal.signal(number, note)

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def ask() -> signal.Signals | None:
        if not came:
            listen()
        return came[0] if came else None

    listen()
    try:
        yield ask
    finally:
        restore()


def _measure_peak_mib(team: Team) -> float:
    """Of the GPU's memory that torch took, or of the process; where there are several, of the one that took most."""
    if team.device.type == "cuda":
        return team.max_over(torch.cuda.max_memory_allocated(team.device) / 2**20)
    return team.max_over(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10)


def _make_row(run: Run, unit: str, losses: list[float], times: list[float], waited: float, floor: float | None,
         parameters: int, peak_mib: float, team: Team, graph: bool) -> dict[str, Any]:
    p20, p50, p80 = (np.quantile(times, (0.2, 0.5, 0.8)) * 1e6).tolist()
    return {
        "bench": "train", **run.identity(),
        "loss": statistics.mean(losses[-max(len(losses) // 10, 1):]), "first_loss": losses[0], "floor": floor,
        "p20_us": p20, "p50_us": p50, "p80_us": p80, "unit": unit, "units_per_s": run.units / p50 * 1e6,
        "data_pct": 100 * waited, "peak_mib": peak_mib, "parameters": parameters, "gpus": team.size,
        "way": team.way if team.size > 1 else None,
        "link_gbps": team.measure_link(), "graph": graph, **record.find_slow_clock(),
        **record.environment(),
    }
