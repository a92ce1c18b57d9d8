"""Time of a training step with one variant after another inside one model, side by side, and the state-space model's part."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ssd import Options, cost

from . import step_graph
from .kernel_names import is_of_operator
from .parallel import Team, make_single
from .record import find_slow_clock
from .terminal import first_line, track
from .timing import list_launches, measure_matrix_tflops, wait_for_gpu
from .training_run import Run
from .training_step import Step, build_model, compile_layers, make_batches
from .workloads import Workload, get_workload
from .workloads.graph_padding import count_fill

_BATCHES = 4  # of steps, whose data are drawn before, so that none waits for them


@dataclass(frozen=True)
class Candidate:
    """One of the things that are put into the model. A peer has no use for options."""

    variant: str
    options: Options = Options()  # noqa: RUF009  frozen


def measure_steps(base: Run, candidates: list[Candidate], repeats: int, warmup: int, console: Console,
                  graph: bool = False, fused: bool = True) -> dict[Candidate, dict]:
    """The measured keys of a row for each candidate; of one that cannot run only `note`, which says why.

    All take their steps with the same weights, which go on changing. One step of each per round, on the same data, so that a
    change of clocks meets all alike; from the batch on the device to the optimizer's last write.

    graph: steps are replays of CUDA graphs; fused: the optimizer is one kernel on a GPU, where it can be.
    """
    workload = get_workload(base.workload)
    team = make_single()
    notes = {}
    if graph:
        reasons = {candidate: step_graph.explain_refusal(replace(base, variant=candidate.variant), team)
                   for candidate in candidates}
        notes = {candidate: {"note": f"--graph: {reason}"} for candidate, reason in reasons.items() if reason}
    dataset = workload.dataset(base)
    candidates = [candidate for candidate in candidates if candidate not in notes]
    model, optimizer, others = _build_with_any(base, candidates, workload, team, graph, fused)
    notes |= others
    if model is None:
        return notes
    drawn = make_batches(replace(base, steps=_BATCHES, warmup=0), workload, dataset, 0, team)
    held = [list(islice(drawn, base.accumulate)) for _ in range(_BATCHES)]
    sizes = min(_BATCHES, repeats) if workload.fill_up else 1  # batches that differ in size, of which a row has the mean

    pool = torch.cuda.graph_pool_handle() if graph else None
    takes: dict[Candidate, Step] = {}

    def make_step(candidate: Candidate) -> Step:
        run = replace(base, variant=candidate.variant)
        if graph:
            return step_graph.CapturedStep(run, workload, model, optimizer, team, pool=pool)
        return Step(run, workload, model, optimizer, team)

    def step(candidate: Candidate, number: int = 0) -> tuple[float, float]:
        """Seconds until it is launched and until it is done, on data that the number says."""
        put_inside(model, candidate)
        batches = iter(held[number % _BATCHES])
        began = time.perf_counter()
        takes[candidate](1, batches)
        launched = time.perf_counter()
        wait_for_gpu()
        return launched - began, time.perf_counter() - began

    def try_call(candidate: Candidate, act: Callable[[], Any]) -> Any:
        """What `act` gives; None and a note if it fails, which must not cost the measurements of the others."""
        try:
            return act()
        except Exception as reason:
            notes[candidate] = {"note": first_line(reason)}
            optimizer.zero_grad()

    def prepare(candidate: Candidate) -> dict:
        takes[candidate] = make_step(candidate)
        peak_mib = None
        if graph:  # on every held batch, whose shapes may differ; a replay takes no memory, a capture does
            peak_mib = _measure_peak_mib(lambda: [step(candidate, n) for n in range((step_graph.WARM_UPS + 1) * _BATCHES)])
        for number in range(warmup):
            step(candidate, number)
        if not graph:
            peak_mib = _measure_peak_mib(partial(step, candidate))
        launches = []
        if torch.cuda.is_available():
            launches = list_launches(lambda: [step(candidate, number) for number in range(sizes)])
        # what upstream leaves to torch's own kernels is not in it
        ssm_us = sum(us for name, us in launches if is_of_operator(name)) / sizes
        # in one stream kernels follow one another
        return {"peak_mib": peak_mib, "ssm_us": ssm_us or None, "busy_us": sum(us for _, us in launches) / sizes or None}

    facts = {candidate: try_call(candidate, partial(prepare, candidate)) for candidate in candidates if candidate not in notes}
    times = {candidate: [] for candidate in candidates}
    for number in track(range(repeats), console, lambda number: f"{base.workload} {base.preset}, step {number + 1}"):
        for candidate in candidates:
            if candidate not in notes:
                times[candidate].append(try_call(candidate, partial(step, candidate, number)))
    slow = find_slow_clock()

    fill_pct = 100 * float(np.mean([count_fill(batch) for batches in held for batch in batches])) if base.buckets else None
    problems = workload.scans(base.sizes, base.batch, base.seqlen) if workload.scans else []
    problems = [replace(problem, itemsize=2 if base.dtype == "bf16" else 4) for problem in problems]
    ideal = sum((cost.ideal(problem, "fwd_bwd") for problem in problems), cost.Cost())
    ideal_bytes, on_gpu = ideal.bytes * base.accumulate, torch.cuda.is_available()
    rows, able = dict(notes), [candidate for candidate in candidates if candidate not in notes]
    flops = None
    if on_gpu and able:
        put_inside(model, able[0])
        try:
            flops = (3 * count_forward_flops(base, workload, model, held[0][0]) + ideal.flops) * base.accumulate
        except Exception as reason:  # must not cost the times
            console.print(f"{base.workload} {base.preset}: FLOPs unknown: {first_line(reason)}", style="yellow", markup=False)
    peak_tflops = measure_matrix_tflops() if flops and base.dtype == "bf16" else None
    for candidate in able:
        host, whole = np.array(times[candidate]).T * 1e6
        p20, p50, p80 = np.mean([np.quantile(whole[n::sizes], (0.2, 0.5, 0.8)) for n in range(sizes)], axis=0).tolist()
        busy_us, ssm_us = facts[candidate].pop("busy_us"), facts[candidate]["ssm_us"]
        effective = ideal_bytes / ssm_us / 1e3 if ideal_bytes and ssm_us else None
        tflops = flops / p50 / 1e6 if flops else None
        rows[candidate] = {
            "p20_us": p20, "p50_us": p50, "p80_us": p80, "unit": workload.unit, "units_per_s": base.units / p50 * 1e6,
            **facts[candidate], "ideal_bytes": ideal_bytes or None, "effective_gbps": effective, "graph": graph,
            "fill_pct": fill_pct, **slow,
            "host_us": float(np.median(host)), "idle_pct": 100 * max(1 - busy_us / p50, 0) if busy_us else None,
            "tflops": tflops, "peak_tflops": peak_tflops, "mfu_pct": 100 * tflops / peak_tflops if peak_tflops else None}
    return rows


def _build_with_any(base: Run, candidates: list[Candidate], workload: Workload, team: Team, graph: bool,
                   fused: bool) -> tuple[nn.Module | None, torch.optim.Optimizer | None, dict[Candidate, dict]]:
    """Model and optimizer with the first candidate that can be built, and notes of those before it."""
    notes = {}
    for candidate in candidates:
        try:
            model, optimizer, _ = build_model(replace(base, variant=candidate.variant), workload, team, graph, fused)
            if base.compile:
                compile_layers(model)
            return model, optimizer, notes
        except Exception as reason:  # as above
            notes[candidate] = {"note": first_line(reason)}
    return None, None, notes


def put_inside(model: nn.Module, candidate: Candidate) -> None:
    """Every mixer that has a variant has this one from now on.

    Raises:
        ValueError: the model has no such mixer, or one that knows no options where the candidate has some.
    """
    mixers = [module for module in model.modules() if hasattr(module, "variant")]
    if not mixers:
        raise ValueError("the model has no mixer with a variant")
    for mixer in mixers:
        if candidate.options != Options() and not hasattr(mixer, "options"):
            raise ValueError(f"{type(mixer).__name__} knows no options")
        mixer.variant, mixer.options = candidate.variant, candidate.options


def _measure_peak_mib(step) -> float | None:
    """Most memory that torch held on the GPU during a step, model and optimizer included."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() / 2**20


def count_forward_flops(run: Run, workload: Workload, model: nn.Module, batch: dict[str, torch.Tensor]) -> int:
    """Of the matrix products and convolutions of a micro-batch's forward that torch makes; of the SSD's kernels none."""
    cast = torch.autocast(next(iter(batch.values())).device.type, torch.bfloat16, enabled=run.dtype == "bf16")
    with FlopCounterMode(display=False) as counter, torch.no_grad(), cast:
        workload.loss(model, workload.prepare(model, batch) if workload.prepare else batch)
    return counter.get_total_flops()
