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

from ssd import Options, cost

from .kernel_names import is_of_operator
from .parallel import Team, make_single
from .terminal import first_line, track
from .timing import list_launches
from .training_run import Run
from .training_step import build_model, compute_gradient, make_batches
from .workloads import Workload, get_workload

_BATCHES = 4  # of steps, whose data are drawn before, so that none waits for them


@dataclass(frozen=True)
class Candidate:
    """One of the things that are put into the model. A peer has no use for options."""

    variant: str
    options: Options = Options()  # noqa: RUF009  frozen


def measure_steps(base: Run, candidates: list[Candidate], repeats: int, warmup: int, console: Console) -> dict[Candidate, dict]:
    """The measured keys of a row for each candidate; of one that cannot run only `note`, which says why.

    All take their steps with the same weights, which go on changing. One step of each per round, on the same data, so that a
    change of clocks meets all alike; from the batch on the device to the optimizer's last write.
    """
    workload = get_workload(base.workload)
    team = make_single()
    dataset = workload.dataset(base)
    model, optimizer, notes = _build_with_any(base, candidates, workload, team)
    if model is None:
        return notes
    drawn = make_batches(replace(base, steps=_BATCHES, warmup=0), workload, dataset, 0, team)
    held = [list(islice(drawn, base.accumulate)) for _ in range(_BATCHES)]

    def step(candidate: Candidate, number: int = 0) -> float:
        """Seconds, on data that the number says."""
        put_inside(model, candidate)
        batches = iter(held[number % _BATCHES])
        began = time.perf_counter()
        compute_gradient(base, 1, workload, model, optimizer, batches, team)
        optimizer.step()
        optimizer.zero_grad()
        _wait()
        return time.perf_counter() - began

    def try_call(candidate: Candidate, act: Callable[[], Any]) -> Any:
        """What `act` gives; None and a note if it fails, which must not cost the measurements of the others."""
        try:
            return act()
        except Exception as reason:
            notes[candidate] = {"note": first_line(reason)}
            optimizer.zero_grad()

    def prepare(candidate: Candidate) -> dict:
        for number in range(warmup):
            step(candidate, number)
        return {"peak_mib": _measure_peak_mib(partial(step, candidate)), "ssm_us": _measure_ssm_us(partial(step, candidate))}

    facts = {candidate: try_call(candidate, partial(prepare, candidate)) for candidate in candidates if candidate not in notes}
    times = {candidate: [] for candidate in candidates}
    for number in track(range(repeats), console, lambda number: f"{base.workload} {base.preset}, step {number + 1}"):
        for candidate in candidates:
            if candidate not in notes:
                times[candidate].append(try_call(candidate, partial(step, candidate, number)))

    problems = workload.scans(base.sizes, base.batch, base.seqlen) if workload.scans else []
    problems = [replace(problem, itemsize=2 if base.dtype == "bf16" else 4) for problem in problems]
    ideal_bytes = sum(cost.ideal(problem, "fwd_bwd").bytes for problem in problems) * base.accumulate
    rows = dict(notes)
    for candidate in [candidate for candidate in candidates if candidate not in notes]:
        p20, p50, p80 = (np.quantile(times[candidate], (0.2, 0.5, 0.8)) * 1e6).tolist()
        ssm_us = facts[candidate]["ssm_us"]
        effective = ideal_bytes / ssm_us / 1e3 if ideal_bytes and ssm_us else None
        rows[candidate] = {
            "p20_us": p20, "p50_us": p50, "p80_us": p80, "unit": workload.unit, "units_per_s": base.units / p50 * 1e6,
            **facts[candidate], "ideal_bytes": ideal_bytes or None, "effective_gbps": effective}
    return rows


def _build_with_any(base: Run, candidates: list[Candidate], workload: Workload,
                   team: Team) -> tuple[nn.Module | None, torch.optim.Optimizer | None, dict[Candidate, dict]]:
    """Model and optimizer with the first candidate that can be built, and notes of those before it."""
    notes = {}
    for candidate in candidates:
        try:
            model, optimizer, _ = build_model(replace(base, variant=candidate.variant), workload, team)
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


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _measure_peak_mib(step) -> float | None:
    """Most memory that torch held on the GPU during a step, model and optimizer included."""
    if not torch.cuda.is_available():
        return None
    torch.cuda.reset_peak_memory_stats()
    step()
    return torch.cuda.max_memory_allocated() / 2**20


def _measure_ssm_us(step) -> float | None:
    """Time of its kernels in a step, None where none is known by name. What upstream leaves to torch's own is not in it."""
    if not torch.cuda.is_available():
        return None
    return sum(us for name, us in list_launches(step) if is_of_operator(name)) or None
