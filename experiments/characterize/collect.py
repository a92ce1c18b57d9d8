"""What training steps do on a GPU, as rows: times by class of operator and phase, and counters by kernel (Figures 1 and 2)."""

import gc
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile

from ssd.registry import is_peer

from .. import autotuned_configs, counters, record
from ..kernel_names import operator_pattern
from ..parallel import make_single
from ..timing import wait_for_gpu
from ..training_run import Run
from ..training_step import Step, build_model, make_batches
from ..workloads import get_workload
from . import trace
from .operators import classify
from .product import multiply
from .scopes import STEP, scope

PROFILED = 3  # steps, each on a batch of its own
SKIPPED = 2 * PROFILED  # steps before, on the same batches: kernels are compiled and chosen for their lengths, memory is taken
CALIBRATION = 8192  # rows and columns of a product whose FLOPs the counters must find


def append_breakdown(run: Run, out: Path, keep: Path | None = None) -> list[dict]:
    """Takes SKIPPED + PROFILED steps of training, and appends the rows of the latter.

    Args:
        keep: where the trace is written as well, for Perfetto and `trace.read`.

    Returns:
        Rows: `us` and `launches` a step, and `share`, of each phase and class; the shares add up to 1, which is the time of all
        kernels, however many ran at once, and the time of none.

    Raises:
        As training does; ValueError: the profiler saw no kernels.
    """
    step = _make_step(run)
    for _ in range(SKIPPED):
        step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED):
            step()
    with TemporaryDirectory() as folder:
        path = keep or Path(folder) / "trace.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        found = trace.read(path)
    return record.add((_identify(run) | values for values in _sum_kernels(found)), out)


def append_counts(run: Run, out: Path, whole: bool = True) -> list[dict]:
    """Counters of one training step, a row for each kernel; `operator` is its class as far as its name tells.

    Args:
        whole: of the bench `step_counters`: all kernels, with their FLOPs, minutes; else of `ssm_counters`: the state-space
            model's alone, without.

    Raises:
        ValueError, OSError: ncu failed, or gave no bytes or times.
    """
    gc.collect()
    torch.cuda.empty_cache()  # for the child
    arguments = ["once", "characterize.collect:run_step", json.dumps({"run": asdict(run)})]
    tunes = is_peer(run.variant)
    launches = (counters.profile(arguments, brief=True, tunes=tunes) if whole else
                counters.count_traffic(arguments, operator_pattern(), tunes))
    identity = _identify(run) | {"bench": "step_counters" if whole else "ssm_counters"}
    return record.add((identity | kernel | {"operator": classify(kernel["kernel"])}
                       for kernel in counters.merge_by_kernel(launches)), out)


def run_step(run: dict) -> None:
    """The step after SKIPPED, between the profiler's start and stop: what `append_counts` runs under ncu. run: a `Run`'s."""
    with autotuned_configs.hand_over_configs():
        counters.run_between_marks(_make_step(Run(**run)), SKIPPED)


def calibrate(out: Path) -> float:
    """FLOPs that the counters find in a bf16 product of CALIBRATION cubed, over the 2 n^3 that it has: 1 to within 1 %.
    Appends a row with it.

    Raises:
        ValueError, OSError: ncu failed; or it does not know the metric.
    """
    metric = counters.TENSOR_FLOPS
    call = ["once", "characterize.collect:run_product"]
    found = [launch.get(metric) for launch in counters.run_ncu(call, [metric], "none")]
    if None in found:
        raise ValueError(f"ncu has no {metric} here")
    ratio = sum(found) / (2 * CALIBRATION**3)
    record.add([{"bench": "calibration", "n": CALIBRATION, "flops_found": ratio}], out)
    return ratio


def run_product() -> None:
    """The product, between the profiler's start and stop: what `calibrate` runs under ncu."""
    a, b = (torch.randn(CALIBRATION, CALIBRATION, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    counters.run_between_marks(lambda: multiply(a, b), 1)


def _make_step(run: Run) -> Callable[[], None]:
    """What takes the run's next step, and waits for it, so that a step's kernels end in it."""
    workload = get_workload(run.workload)
    team = make_single()
    model, optimizer, _ = build_model(run, workload, team)
    drawn = make_batches(run, workload, workload.dataset(run), 0, team)
    take = Step(run, workload, model, optimizer, team)
    # before, so that no step waits for data
    batches, numbers = itertools.cycle(list(islice(drawn, PROFILED * run.accumulate))), itertools.count(1)

    def step() -> None:
        with scope(STEP):
            take(next(numbers), batches)
            wait_for_gpu()

    return step


def _sum_kernels(found: trace.Trace) -> Iterator[dict]:
    times, launches = Counter(), Counter()
    for kernel in found.kernels:
        times[kernel.phase, kernel.kind] += kernel.us
        launches[kernel.phase, kernel.kind] += 1
    times["", "idle"] = found.idle_us
    total = sum(times.values())
    for (phase, kind), us in sorted(times.items()):
        yield {"phase": phase, "operator": kind, "us": us / PROFILED, "share": us / total,
               "launches": launches[phase, kind] / PROFILED, "steps": PROFILED}


def _identify(run: Run) -> dict:
    return {"bench": "characterize", "mixer": run.mixer, **run.identity()}
