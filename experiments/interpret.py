"""The bench without a GPU: check kernels in Triton's interpreter, and show costs beside the last rows of GPUs."""

from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from ssd import Options, cost, get_variant, ssd_chunk_scan
from ssd.types import SSDInputs

from . import counters, record, table
from .accuracy import Error, Part, Truth, leaves_of
from .inputs import DTYPES, make_inputs
from .shapes import MODES, SMALL, Shape

_CHUNK_SIZE = 32
# The largest error accepted, rms and maximum alike. bf16 is left out: the interpreter computes it wrongly.
_LIMITS = {"fp32": 1e-4, "fp16": 1e-2}
_BOUNDS = ("memory", "tensor", "exp")  # what `cost.Ceilings.compute_floors_us` gives a time for
ERRORS = table.make_columns("variant", "options", "dtype", "worst in", "rms error", "max error", "limit", "verdict")
_COSTS = table.make_columns("shape", "mode") | {
    "ideal MB": ("ideal_bytes", table.write_number(0, 1e-6)), "DRAM MB": ("dram_bytes", table.write_number(0, 1e-6)),
    "floor us": ("floor_us", table.write_microseconds), "bound by": ("bound", str), "chunk": ("chunk_size", table.write_text),
    "GPU us": ("graph_p50_us", table.write_microseconds), "of floor %": ("of_floor", table.write_number(0, 100))}
_STAGES = table.make_columns("stage", "MB", "GFLOP", "exp M", "memory us", "tensor us", "exp us")


def run(variants: list[str], shapes: list[Shape], modes: list[str], dtype: str, chunk_size: int, options: Sequence[Options],
        out: Path, console: Console, wide: bool = False) -> bool:
    """Prints the errors, with each set of options, and the costs of the variants. Returns whether all that can run here agree
    with fp64.
    """
    sizes = ", ".join(f"{name} {size}" for name, size in SMALL.sizes.items())
    console.print("No CUDA GPU: nothing is timed. Triton's interpreter runs the kernels at a small shape:", style="bold")
    console.print(f"{sizes}, chunk_size {_CHUNK_SIZE}", style="bold")
    passed = [_check(name, modes, of, console) for name in variants for of in options]
    rows = record.read(record.read_gpus(out), dtype=dtype) if out.is_dir() else []
    for name in variants:
        _show_costs(name, shapes, modes, dtype, chunk_size, rows, console)
        if wide and name == "baseline":
            for shape in shapes:
                console.print(_stages(shape, dtype, chunk_size))
    return all(passed)


def check(variant: str, dtype: str, options: Options, modes: tuple[str, ...] | list[str] = MODES) -> dict[str, Error]:
    """Errors of what the modes compute at the small shape: the output, every gradient, or both."""
    inputs = make_inputs(SMALL, DTYPES[dtype], "cpu", requires_grad=True)
    dout = torch.randn(inputs["x"].shape, generator=torch.Generator().manual_seed(1)).to(DTYPES[dtype])
    truth = Truth(inputs, dout, Part(SMALL.batch, SMALL.seqlen, SMALL.nheads, SMALL.ngroups))
    scan = partial(ssd_chunk_scan, **inputs, chunk_size=_CHUNK_SIZE, variant=variant, options=options)
    errors = {"out": truth.out_error(scan)} if {*modes} - {"bwd"} else {}
    if {"bwd", "fwd_bwd"} & {*modes}:
        gradients = truth.grad_errors(scan, list(leaves_of(inputs).values()))
        errors |= {f"d{name}": error for name, error in gradients.items()}
    return errors


def judge(variant: str, options: Options, modes: tuple[str, ...] | list[str] = MODES) -> list[dict]:
    """A row of `ERRORS` for each dtype: the worst error, and whether it is within the limit; NaN is not."""
    rows = []
    for dtype, limit in _LIMITS.items():
        errors = check(variant, dtype, options, modes)
        worst = Error.worst(list(errors.values()))
        name = next((name for name, error in errors.items() if not max(error.rms, error.max) < max(worst.rms, worst.max)), "")
        agrees = worst.rms <= limit and worst.max <= limit
        rows.append({"variant": variant, "options": record.describe_options(asdict(options)), "dtype": dtype, "worst in": name,
                     "rms error": f"{worst.rms:.1e}", "max error": f"{worst.max:.1e}", "limit": f"{limit:.0e}",
                     "agrees": agrees, "verdict": "agrees" if agrees else "DOES NOT AGREE"})
    return rows


def _check(variant: str, modes: list[str], options: Options, console: Console) -> bool:
    """Prints the errors; False if one is too large. A variant that cannot run here is said to be left out."""
    try:
        reason = get_variant(variant).supports(SSDInputs(**make_inputs(SMALL, torch.float32, "cpu"), chunk_size=_CHUNK_SIZE))
    except ImportError as missing:
        reason = str(missing)
    if reason:
        console.print(f"{variant} is not checked here: {reason}", style="yellow", markup=False)
        return True
    rows = judge(variant, options, modes)
    console.print(table.make_table(rows, "errors against fp64, relative", ERRORS))
    return all(row["agrees"] for row in rows)


def _show_costs(variant: str, shapes: list[Shape], modes: list[str], dtype: str, chunk_size: int, rows: list[dict],
                console: Console) -> None:
    """A line for each shape and mode: what the ideal operator must move, its floor on an H200, what the variant took there."""
    rows = [row for row in rows if "H200" in row["gpu"]]
    timed = {(row["shape"], row["mode"]): row for row in table.read_latest(rows, variant=variant)
             if record.has_default_options(row)}
    counted = {(call["shape"], call["mode"]): call["dram_bytes"] for call in counters.read_latest(rows)
               if call["variant"] == variant and record.has_default_options(call)}
    lines = []
    for shape in shapes:
        for mode in modes:
            ideal = cost.ideal(shape.problem(chunk_size, dtype), mode)
            floor, bound = max(zip(cost.H200.compute_floors_us(ideal), _BOUNDS, strict=True))
            row = timed.get((shape.name, mode), {})
            us = row.get("graph_p50_us") or row.get("p50_us")
            lines.append({"shape": shape.name, "mode": mode, "ideal_bytes": ideal.bytes, "floor_us": floor, "bound": bound,
                          "dram_bytes": counted.get((shape.name, mode)), "chunk_size": row.get("chunk_size"),
                          "graph_p50_us": us, "of_floor": us and floor / us, "git_sha": row.get("git_sha"),
                          "time": row.get("time", "")})
    measured = "measured there" if timed else "not measured there yet"
    table.show(console, [line | {"gpu": measured, "dtype": dtype} for line in lines],
               f"{variant}: costs, floors on an H200", _COSTS)


def _stages(shape: Shape, dtype: str, chunk_size: int):
    """The cost model of one shape: the baseline's stages and the ideal operator, with floors on an H200."""
    p = shape.problem(chunk_size, dtype)
    lines = []
    for direction, stages, ideal in (("forward", cost.count_forward_stages(p), cost.count_ideal_forward(p)),
                                     ("backward", cost.count_backward_stages(p), cost.count_ideal_backward(p))):
        named = {**stages, f"{direction}, all stages": cost.total(stages), f"{direction}, ideal": ideal}
        for name, c in named.items():
            values = (c.bytes / 1e6, c.flops / 1e9, c.exps / 1e6, *cost.H200.compute_floors_us(c))
            lines.append(dict(zip(_STAGES, (name, *(f"{value:.1f}" for value in values)), strict=True)))
    return table.make_table(lines, f"{shape.name}, {dtype}, chunk_size {chunk_size}: the baseline's stages, floors on an H200",
                          _STAGES)
