"""The bench: variants and peers side by side on one GPU, one row for each variant, shape, mode and chunk size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from ssd import Options, cost, get_variant, ssd_chunk_scan
from ssd.registry import is_peer

from . import record, timing
from .accuracy import LEAVES, Error, Part, Truth
from .shapes import DTYPES, Shape, make_inputs

MODES = ("fwd", "fwd_train", "bwd", "fwd_bwd")
CHUNK_SIZES = (64, 128, 256)
_PEER_CHUNK_SIZES = {"mamba_ssm": (128, 256), "fla": (64,)}  # those that each was written for
_TRUTH_TOKENS = 16384


@dataclass(frozen=True)
class Plan:
    """What to measure. chunk_sizes are ours; a peer runs at its own."""

    variants: tuple[str, ...]
    against: str | None
    shapes: tuple[Shape, ...]
    modes: tuple[str, ...]
    dtype: str = "bf16"
    chunk_sizes: tuple[int, ...] = CHUNK_SIZES
    repeats: int = 50
    warmup: int = 10
    out: Path = record.RESULTS

    def candidates(self) -> list[tuple[str, int]]:
        """(variant, chunk size) of everything that runs side by side."""
        names = dict.fromkeys((*self.variants, *([self.against] if self.against else [])))
        return [(name, size) for name in names for size in _PEER_CHUNK_SIZES.get(name, self.chunk_sizes)]


def run(plan: Plan, console: Console) -> list[dict]:
    """Measures the plan and returns its rows, each appended to its file as soon as it is known."""
    rows = []
    candidates = [c for c in plan.candidates() if _installed(c[0], console)]
    with timing.side_stream(), Progress(console=console) as progress:
        ceiling = timing.copy_gbps()
        task = progress.add_task("", total=len(plan.shapes) * len(plan.modes))
        for shape in plan.shapes:
            setting = Setting(shape, plan.dtype)
            for mode in plan.modes:
                progress.update(task, description=f"{shape.name} {mode}")
                for row in _measure(plan, setting, mode, candidates, console):
                    row = _derived(row, shape.problem(row["chunk_size"], setting.dtype), ceiling) | record.environment()
                    record.append(row, plan.out)
                    rows.append(row)
                progress.advance(task)
    return rows


class Setting:
    """A shape's tensors on the GPU, and their truth."""

    def __init__(self, shape: Shape, dtype: str):
        self.shape, self.dtype = shape, DTYPES[dtype]
        self.inputs = make_inputs(shape, self.dtype, "cuda", requires_grad=True)
        self.leaves = [self.inputs[name] for name in LEAVES]
        self.dout = torch.randn_like(self.inputs["x"])
        part = Part(1, min(shape.seqlen, _TRUTH_TOKENS), shape.nheads // shape.ngroups, 1)
        self.truth = Truth(self.inputs, self.dout, part)

    def call(self, candidate: tuple[str, int], mode: str) -> timing.Call:
        """What one measurement of the mode runs."""
        variant, chunk_size = candidate
        scan = partial(ssd_chunk_scan, **self.inputs, chunk_size=chunk_size, variant=variant)
        match mode:
            case "fwd":
                return torch.no_grad()(scan)
            case "fwd_train":
                return scan
            case "bwd":
                return partial(torch.autograd.grad, scan(), self.leaves, self.dout, retain_graph=True)
            case "fwd_bwd":
                return lambda: torch.autograd.grad(scan(), self.leaves, self.dout)

    def error(self, candidate: tuple[str, int], mode: str) -> Error:
        """Of the output, or in a mode with a backward of the worst gradient."""
        variant, chunk_size = candidate
        scan = partial(ssd_chunk_scan, **self.inputs, chunk_size=chunk_size, variant=variant)
        if mode.startswith("fwd") and mode != "fwd_bwd":
            return self.truth.out_error(scan)
        return Error.worst(list(self.truth.grad_errors(scan, self.leaves).values()))


def _measure(plan: Plan, setting: Setting, mode: str, candidates: list, console: Console) -> Iterator[dict]:
    """Rows of one shape and mode, without what `_derived` adds."""
    calls, facts, notes = {}, {}, {}
    for candidate in candidates:
        try:
            call = setting.call(candidate, mode)
            call()  # compiles and tunes
            error = setting.error(candidate, mode)
            facts[candidate] = {
                "launches": timing.count_launches(call), "peak_mib": round(timing.peak_mib(call), 1),
                "err_rms": _finite(error.rms), "err_max": _finite(error.max), "err_seqlen": setting.truth.part.tokens,
            }
            calls[candidate] = call
            if not math.isfinite(error.rms):
                notes[candidate] = "the result is not finite"
        except Exception as reason:  # one that cannot run must not cost the measurements of the others
            _say_skipped(console, candidate, f"{setting.shape.name} {mode}", reason)
    eager = timing.interleaved(calls, plan.repeats, plan.warmup)

    graphs = {}
    for candidate, call in calls.items():
        try:
            graphs[candidate] = timing.capture(call)
        except Exception as reason:  # as above
            notes[candidate] = f"no CUDA graph: {_first_line(reason)}"
            torch.cuda.synchronize()
    replayed = timing.interleaved(graphs, plan.repeats, plan.warmup)

    rival = {
        "against_p50_us": min((eager[c][1] for c in calls if c[0] == plan.against), default=None),
        "against_graph_p50_us": min((replayed[c][1] for c in graphs if c[0] == plan.against), default=None),
    }
    for candidate in calls:
        variant, chunk_size = candidate
        p20, p50, p80 = eager[candidate]
        compared = variant != plan.against and rival["against_p50_us"] is not None
        yield {
            "bench": "ssd", "variant": variant, "options": None if is_peer(variant) else asdict(Options()),
            "mode": mode, "shape": setting.shape.name, **setting.shape.sizes, "dtype": plan.dtype,
            "chunk_size": chunk_size,
            "p20_us": p20, "p50_us": p50, "p80_us": p80, "graph_p50_us": replayed.get(candidate, (None,) * 3)[1],
            **facts[candidate], "note": notes.get(candidate, get_variant(variant).adapts),
            **({"against": plan.against, **rival} if compared else {}),
        }


def _derived(row: dict, problem: cost.Problem, ceiling_gbps: float) -> dict:
    """The row with what follows from its times: against the ideal operator, the copy ceiling and the rival."""
    ideal = cost.ideal(problem, row["mode"])
    effective = ideal.bytes / row["p50_us"] / 1e3
    row |= {
        "ideal_bytes": ideal.bytes, "effective_gbps": effective, "copy_gbps": ceiling_gbps,
        "sol": effective / ceiling_gbps, "tflops": ideal.flops / row["p50_us"] / 1e6,
    }
    if row.get("against"):
        row["speedup"] = row["against_p50_us"] / row["p50_us"]
        graphs = row["against_graph_p50_us"], row["graph_p50_us"]
        row["graph_speedup"] = graphs[0] / graphs[1] if all(graphs) else None
    return row


def _installed(variant: str, console: Console) -> bool:
    try:
        get_variant(variant)
    except ImportError as reason:
        console.print(f"{variant} is left out: {reason}", style="yellow", markup=False)
        return False
    return True


def _say_skipped(console: Console, candidate: tuple[str, int], where: str, reason: Exception) -> None:
    variant, chunk_size = candidate
    text = f"{where}: {variant} at chunk size {chunk_size} is left out: {_first_line(reason)}"
    console.print(text, style="yellow", markup=False)


def _first_line(reason: Exception) -> str:
    return (str(reason).splitlines() or [type(reason).__name__])[0]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
