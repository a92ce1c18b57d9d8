"""The bench: variants and peers side by side on one GPU, one row for each variant, shape, mode and chunk size."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from ssd import Options, cost, get_variant, ssd_chunk_scan
from ssd.registry import is_peer

from . import choose, record, timing
from .accuracy import Error, Part, Truth, leaves_of
from .autotuned_configs import compile_together
from .inputs import DTYPES, make_inputs
from .shapes import CHUNK_SIZES, Shape
from .terminal import leave_out, track

_PEER_CHUNK_SIZES = {"mamba_ssm": CHUNK_SIZES, "fla": (64,)}  # fla was written for that one
_SHORT_SEQLEN = 512  # tokens: in longer sequences mamba_ssm takes 1.4 to 1.7 times its least time with chunks of 64
_TRUTH_TOKENS = 16384


@dataclass(frozen=True)
class Candidate:
    """One of the implementations that run side by side. A peer takes no options."""

    variant: str
    chunk_size: int
    options: Options = Options()  # noqa: RUF009  frozen

    def __str__(self) -> str:
        changed = record.describe_options(asdict(self.options))
        return f"{self.variant} at chunk size {self.chunk_size}{' with ' if changed else ''}{changed}"

    def identity(self) -> dict:
        """The keys of a row that say what ran."""
        options = None if is_peer(self.variant) else asdict(self.options)
        return {"variant": self.variant, "options": options, "chunk_size": self.chunk_size}


def run(variants: Sequence[str], against: str | None, shapes: Sequence[Shape], modes: Sequence[str], dtype: str,
        chunk_sizes: Sequence[int], options: Sequence[Options], out: Path, console: Console, repeats: int = 50,
        warmup: int = 10) -> list[dict]:
    """Measures variants beside a rival and returns the rows, each appended to its file as soon as it is known.

    chunk_sizes and options are ours, each variant with each set of options that differs for it; a peer runs at its own.
    """
    rows, present = [], []
    for name in dict.fromkeys((*variants, *([against] if against else []))):
        with leave_out(console, name, ImportError):
            _describe_adapter(name)
            present.append(name)
    for setting, mode, ceiling in list_settings(shapes, modes, dtype, console):
        candidates = [Candidate(name, size, of) for name in present for of in _list_options(name, options)
                      for size in _list_chunk_sizes(name, setting.shape.seqlen, chunk_sizes)]
        measured = measure(setting, mode, candidates, repeats, warmup, console)
        rival = compare_with(against, measured)
        for candidate, values in measured.items():
            compared = rival if candidate.variant != against else {}
            rows.append(make_row("ssd", setting, mode, candidate, values | compared, ceiling))
            record.append(rows[-1], out)
    return rows


def _list_chunk_sizes(variant: str, seqlen: int, ours: Sequence[int]) -> list[int]:
    """At which a variant is measured on sequences of so many tokens."""
    slow = {64} if variant == "mamba_ssm" and seqlen > _SHORT_SEQLEN else set()
    return [size for size in _PEER_CHUNK_SIZES.get(variant, ours) if size not in slow]


def _list_options(variant: str, ours: Sequence[Options]) -> list[Options]:
    """With which a variant is measured: a peer takes none, and "auto" keeps no states unless it is given keep_bytes."""
    if is_peer(variant):
        return [*ours[:1]]
    apart: dict[Options, Options] = {}
    for of in ours:
        apart.setdefault(replace(of, save_states=False) if variant == "auto" and not of.keep_bytes else of, of)
    return [*apart.values()]


def list_settings(shapes: Sequence[Shape], modes: Sequence[str], dtype: str,
                  console: Console) -> Iterator[tuple[Setting, str, float]]:
    """Every shape in every mode, and the copy rate in GB/s. The caller's code runs on a side stream, and progress is shown."""
    with timing.side_stream(), compile_together():
        ceiling, setting = timing.measure_copy_gbps(), None
        every = [(shape, mode) for shape in shapes for mode in modes]
        for shape, mode in track(every, console, lambda one: f"{one[0].name} {one[1]}"):
            if setting is None or setting.shape != shape:
                setting = Setting(shape, dtype)
            yield setting, mode, ceiling


def make_row(bench: str, setting: Setting, mode: str, candidate: Candidate, values: dict, ceiling_gbps: float) -> dict:
    """A whole row: what ran, what was measured, what follows from it, and where."""
    row = {"bench": bench, "mode": mode, "shape": setting.shape.name, **setting.shape.sizes, "dtype": setting.dtype_name,
           **candidate.identity(), **values}
    problem = setting.shape.problem(candidate.chunk_size, setting.dtype_name)
    row = _add_derived(row, problem, ceiling_gbps) | record.environment()
    return row | {"ran": choose.name_kernels(row)}


class Setting:
    """A shape's tensors on the GPU, and their truth."""

    def __init__(self, shape: Shape, dtype: str):
        self.shape, self.dtype_name, self.dtype = shape, dtype, DTYPES[dtype]
        self.inputs = make_inputs(shape, self.dtype, "cuda", requires_grad=True)
        self.leaves = list(leaves_of(self.inputs).values())
        self.dout = torch.randn_like(self.inputs["x"])
        part = Part(1, min(shape.seqlen, _TRUTH_TOKENS), shape.nheads // shape.ngroups, 1)
        self.truth = Truth(self.inputs, self.dout, part)

    def scan(self, candidate: Candidate) -> Callable[[], torch.Tensor]:
        """The forward of a candidate on these tensors."""
        return partial(ssd_chunk_scan, **self.inputs, chunk_size=candidate.chunk_size, variant=candidate.variant,
                       options=candidate.options)

    def call(self, candidate: Candidate, mode: str) -> timing.Call:
        """What one measurement of the mode runs."""
        return timing.make_call(self.scan(candidate), mode, self.leaves, self.dout)

    def error(self, candidate: Candidate, mode: str) -> Error:
        """Of the output, or in a mode with a backward of the worst gradient."""
        scan = self.scan(candidate)
        if mode.startswith("fwd") and mode != "fwd_bwd":
            return self.truth.out_error(scan)
        return Error.worst(list(self.truth.grad_errors(scan, self.leaves).values()))


def measure(setting: Setting, mode: str, candidates: list[Candidate], repeats: int, warmup: int,
            console: Console) -> dict[Candidate, dict]:
    """The measured keys of a row for each candidate that can run, timed side by side."""
    calls, facts, notes = {}, {}, {}
    for candidate in candidates:
        with leave_out(console, f"{setting.shape.name} {mode}: {candidate}"):
            call = setting.call(candidate, mode)
            call()  # compiles and tunes
            error = setting.error(candidate, mode)
            facts[candidate] = {"err_rms": _drop_nonfinite(error.rms), "err_max": _drop_nonfinite(error.max),
                                "err_seqlen": setting.truth.part.tokens}
            if mode in ("fwd_train", "fwd_bwd"):
                facts[candidate]["saved_mib"] = round(timing.measure_saved_mib(setting.scan(candidate)), 1)
            notes[candidate] = None if math.isfinite(error.rms) else "the result is not finite"
            calls[candidate] = call
    return {candidate: values | facts[candidate] |
            {"note": values["note"] or notes[candidate] or _describe_adapter(candidate.variant)}
            for candidate, values in timing.measure(calls, repeats, warmup).items()}


def compare_with(against: str | None, measured: dict[Candidate, dict]) -> dict:
    """The keys that compare with a rival, at its better chunk size; none where it was not measured."""
    rival = [values for candidate, values in measured.items() if candidate.variant == against]
    if not rival:
        return {}
    graphs = [values["graph_p50_us"] for values in rival if values["graph_p50_us"] is not None]
    return {"against": against, "against_p50_us": min(values["p50_us"] for values in rival),
            "against_graph_p50_us": min(graphs, default=None)}


def _add_derived(row: dict, problem: cost.Problem, ceiling_gbps: float) -> dict:
    """The row with what its times say beside the ideal operator, the copy ceiling and the rival."""
    ideal = cost.ideal(problem, row["mode"])
    effective = ideal.bytes / row["p50_us"] / 1e3
    return add_speedups(row | {
        "ideal_bytes": ideal.bytes, "effective_gbps": effective, "copy_gbps": ceiling_gbps,
        "sol": effective / ceiling_gbps, "tflops": ideal.flops / row["p50_us"] / 1e6})


def add_speedups(row: dict) -> dict:
    """The row, with the speed-ups over the rival whose keys of `compare_with` it has, if it has them."""
    if not row.get("against"):
        return row
    return row | timing.compare_times(row["p50_us"], row["graph_p50_us"], row["against_p50_us"], row["against_graph_p50_us"])


def _describe_adapter(variant: str) -> str | None:
    """What a peer's time includes besides its kernels; "auto" is timed with its choice."""
    return None if variant == "auto" else get_variant(variant).adapts


def _drop_nonfinite(value: float) -> float | None:
    return value if math.isfinite(value) else None
