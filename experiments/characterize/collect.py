"""What training steps do on a GPU, as rows: times by class of operator and phase, and counters by kernel (Figures 1 and 2)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from torch.profiler import ProfilerActivity, profile

from ssd import Options
from ssd.registry import is_peer

from .. import counters, record
from ..runs import Run
from ..train import train
from . import trace
from .operators import classify
from .scopes import STEP, scope

SKIPPED = 5  # steps before those that are profiled: kernels are compiled and chosen, memory is taken
PROFILED = 3
CALIBRATION = 8192  # rows and columns of a product whose FLOPs the counters must find


class _Done(Exception):
    """Ends a run after the last step that matters, before it would be saved."""


def breakdown(run: Run, out: Path, keep: Path | None = None) -> list[dict]:
    """Trains SKIPPED + PROFILED steps and appends the rows of the latter.

    Args:
        run: of at least so many steps; further ones are not taken.
        keep: where the trace is written as well, for Perfetto and `trace.read`.

    Returns:
        Rows: `us` and `launches` a step, and `share` of the step, of each phase and class; the shares add up to 1.

    Raises:
        As `train` does; ValueError: the profiler saw no kernels.
    """
    with TemporaryDirectory() as folder:
        path = keep or Path(folder) / "trace.json"
        profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
        try:
            train(run, Path(folder) / "run", Console(quiet=True), rows=Path(folder), around=_profiling(profiler))
        except _Done:
            path.parent.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(path))
        found = trace.read(path)
    environment = record.environment()
    rows = [{**_identity(run), **values, **environment} for values in _values(found)]
    for row in rows:
        record.append(row, out)
    return rows


def count(run: Run, out: Path) -> list[dict]:
    """Counters of one training step, a row for each kernel; `operator` is its class as far as its name tells.

    Raises:
        ValueError, OSError: ncu failed, or gave no bytes or times.
    """
    torch.cuda.empty_cache()  # for the child
    launches = counters.profile(["profiled-step", run.workload, run.preset, run.mixer, run.variant, run.dtype])
    environment = record.environment()
    rows = [{**_identity(run), "bench": "step_counters", **kernel, "operator": classify(kernel["kernel"]), **environment}
            for kernel in counters.by_kernel(launches)]
    for row in rows:
        record.append(row, out)
    return rows


def profiled_step(run: Run) -> None:
    """The step after SKIPPED, between the profiler's start and stop: what `count` runs under ncu."""

    @contextmanager
    def around(step: int) -> Iterator[None]:
        if step <= SKIPPED:
            yield
            return
        _wait()
        torch.cuda.profiler.start()
        with scope(STEP):
            yield
            _wait()
        torch.cuda.profiler.stop()
        raise _Done

    with TemporaryDirectory() as folder, suppress(_Done):
        train(run, Path(folder) / "run", Console(quiet=True), rows=Path(folder), around=around)


def calibrate() -> float:
    """FLOPs that the counters find in a bf16 product of CALIBRATION cubed, over the 2 n^3 that it has: 1 to within 1 %.

    Raises:
        ValueError, OSError: ncu failed; or it does not know the metric.
    """
    metric = counters.TENSOR_FLOPS
    found = [launch.get(metric) for launch in counters.ncu(["profiled-product"], [metric], "none")]
    if None in found:
        raise ValueError(f"ncu has no {metric} here")
    return sum(found) / (2 * CALIBRATION**3)


def profiled_product() -> None:
    """The product, between the profiler's start and stop: what `calibrate` runs under ncu."""
    a, b = (torch.randn(CALIBRATION, CALIBRATION, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    a @ b
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    a @ b
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def _profiling(profiler: profile):
    """What `train` enters around each step."""

    @contextmanager
    def around(step: int) -> Iterator[None]:
        if step <= SKIPPED:
            yield
            return
        if step == SKIPPED + 1:
            _wait()
            profiler.start()
        with scope(STEP):
            yield
            _wait()  # so that a step's kernels end in it
        if step == SKIPPED + PROFILED:
            profiler.stop()
            raise _Done

    return around


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _values(found: trace.Trace) -> Iterator[dict]:
    times, launches = Counter(), Counter()
    for kernel in found.kernels:
        times[kernel.phase, kernel.kind] += kernel.us
        launches[kernel.phase, kernel.kind] += 1
    times["", "idle"] = found.idle_us
    total = sum(times.values())
    for (phase, kind), us in sorted(times.items()):
        yield {"phase": phase, "operator": kind, "us": us / PROFILED, "share": us / total,
               "launches": launches[phase, kind] / PROFILED, "steps": PROFILED}


def _identity(run: Run) -> dict:
    return {"bench": "characterize", "workload": run.workload, "preset": run.preset, "mixer": run.mixer, "variant": run.variant,
            "options": None if is_peer(run.variant) else asdict(Options()), "batch": run.batch, "seqlen": run.seqlen,
            "dtype": run.dtype}
