"""Time of a training step with one variant after another inside one model, side by side, and the state-space model's part."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from itertools import cycle, islice

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from torch import nn

from ssd import Options, cost

from .kernel_names import is_of_operator
from .parallel import Team
from .reasons import first_line
from .runs import Run
from .steps import batches_of, gradient, made
from .workloads import get_workload

_BATCHES = 4  # that steps take in turn, so that none waits for data


@dataclass(frozen=True)
class Candidate:
    """One of the things that are put into the model. A peer has no use for options."""

    variant: str
    options: Options = Options()  # noqa: RUF009  frozen


def measure(base: Run, candidates: list[Candidate], repeats: int, warmup: int, console: Console,
            failed: list[str]) -> dict[Candidate, dict]:
    """The measured keys of a row for each candidate that can run; a line in `failed` for each that cannot.

    All take their steps with the same weights, which go on changing; nothing of that shows in a time. One step of each per
    round, so that a change of clocks meets all alike, from the batch on the device to the optimizer's last write.
    """
    workload = get_workload(base.workload)
    team = Team(0, 1, torch.device("cuda" if torch.cuda.is_available() else "cpu"), "ddp")
    dataset = workload.dataset(base)
    model, optimizer, _ = made(replace(base, variant=candidates[0].variant), workload, team)
    batches = cycle(list(islice(batches_of(base, workload, dataset, 0, team), _BATCHES)))

    def step(candidate: Candidate) -> float:
        """Seconds."""
        put_inside(model, candidate)
        began = time.perf_counter()
        gradient(base, 1, workload, model, optimizer, batches, team)
        optimizer.step()
        optimizer.zero_grad()
        _wait()
        return time.perf_counter() - began

    facts = {}
    for candidate in candidates:
        try:
            for _ in range(warmup):
                step(candidate)
            facts[candidate] = {"peak_mib": _peak_mib(lambda c=candidate: step(c)),
                                "ssm_us": _ssm_us(lambda c=candidate: step(c))}
        except Exception as reason:  # one that cannot run must not cost the measurements of the others
            failed.append(f"{base.workload} {base.preset} {base.mixer} {candidate.variant}: {first_line(reason)}")
            optimizer.zero_grad()
    times = {candidate: [] for candidate in facts}
    with Progress(console=console) as progress:
        task = progress.add_task(f"{base.workload} {base.preset}", total=repeats)
        for _ in range(repeats):
            for candidate, taken in times.items():
                taken.append(step(candidate))
            progress.advance(task)

    problems = workload.scans(base.sizes, base.batch, base.seqlen) if workload.scans else []
    ideal_bytes = sum(cost.ideal(problem, "fwd_bwd").bytes for problem in problems) * base.accumulate
    rows = {}
    for candidate, taken in times.items():
        p20, p50, p80 = (np.quantile(taken, (0.2, 0.5, 0.8)) * 1e6).tolist()
        ssm_us = facts[candidate]["ssm_us"]
        effective = ideal_bytes / ssm_us / 1e3 if ideal_bytes and ssm_us else None
        rows[candidate] = {
            "p20_us": p20, "p50_us": p50, "p80_us": p80, "unit": workload.unit, "units_per_s": base.units / p50 * 1e6,
            **facts[candidate], "ideal_bytes": ideal_bytes or None, "effective_gbps": effective,
        }
    return rows


def put_inside(model: nn.Module, candidate: Candidate) -> None:
    """Every mixer that has a variant has this one from now on.

    Raises:
        ValueError: the model has no such mixer.
    """
    mixers = [module for module in model.modules() if hasattr(module, "variant")]
    if not mixers:
        raise ValueError("the model has no mixer with a variant")
    for mixer in mixers:
        mixer.variant = candidate.variant
        if hasattr(mixer, "options"):
            mixer.options = candidate.options


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _peak_mib(step) -> float | None:
    """Most memory that torch held on the GPU during a step, model and optimizer included."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() / 2**20


def _ssm_us(step) -> float | None:
    """Time of its kernels in a step. What upstream leaves to torch's own kernels between them is not in it."""
    if not torch.cuda.is_available():
        return None
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
    return sum(event.device_time for event in profile.events()
               if event.device_type == torch.autograd.DeviceType.CUDA and is_of_operator(event.name))
