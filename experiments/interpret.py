"""The bench where there is no GPU: kernels checked in Triton's interpreter, costs computed, committed rows shown."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from ssd import Options, cost, get_variant, ssd_chunk_scan
from ssd.types import SSDInputs

from . import table
from .accuracy import LEAVES, Error, Part, Truth
from .shapes import DTYPES, SMALL, Shape, make_inputs

_CHUNK_SIZE = 32
# Largest error accepted, rms and maximum alike. bf16 is left out: the interpreter's arithmetic in it is wrong.
_LIMITS = {"fp32": 1e-4, "fp16": 1e-2}


def run(variants: list[str], shapes: list[Shape], dtype: str, chunk_size: int, options: Options, out: Path,
        console: Console) -> bool:
    """Whether every variant that runs here agrees with fp64 under these options."""
    console.print("No CUDA GPU: nothing is timed; kernels run in Triton's interpreter at a small shape.", style="bold")
    passed = [_check(name, options, console) for name in variants]
    for shape in shapes:
        console.print(_costs(shape, dtype, chunk_size))
    asked = {shape.name for shape in shapes}
    for name in variants:
        rows = [row for row in table.committed(out, variant=name) if row["shape"] in asked]
        title = f"{name}: rows measured on GPUs"
        console.print(table.terminal(rows, title) if rows else f"{name}: no GPU rows for these shapes yet")
    console.print("Nothing was timed in this run.", style="bold")
    return all(passed)


def check(variant: str, dtype: str, options: Options) -> dict[str, Error]:
    """Errors of the output and of every gradient at the small shape."""
    inputs = make_inputs(SMALL, DTYPES[dtype], "cpu", requires_grad=True)
    dout = torch.randn(inputs["x"].shape, generator=torch.Generator().manual_seed(1)).to(DTYPES[dtype])
    truth = Truth(inputs, dout, Part(SMALL.batch, SMALL.seqlen, SMALL.nheads, SMALL.ngroups))
    scan = partial(ssd_chunk_scan, **inputs, chunk_size=_CHUNK_SIZE, variant=variant, options=options)
    gradients = truth.grad_errors(scan, [inputs[name] for name in LEAVES])
    return {"out": truth.out_error(scan), **{f"d{name}": error for name, error in gradients.items()}}


def worst(variant: str, options: Options) -> dict[str, Error]:
    """{dtype: the worst error of the output and the gradients}."""
    return {dtype: Error.worst(list(check(variant, dtype, options).values())) for dtype in _LIMITS}


def within(dtype: str, error: Error) -> bool:
    """Whether an error is accepted; NaN is not."""
    return error.rms <= _LIMITS[dtype] and error.max <= _LIMITS[dtype]


def written(dtype: str, error: Error) -> str:
    """rms / max, in red where it is not accepted."""
    text = f"{error.rms:.1e} / {error.max:.1e}"
    return text if within(dtype, error) else f"[red]{text}[/]"


def _check(variant: str, options: Options, console: Console) -> bool:
    """Prints the errors; False if one is too large. A variant that cannot run here is said to be left out."""
    inputs = make_inputs(SMALL, torch.float32, "cpu")
    try:
        reason = get_variant(variant).supports(SSDInputs(**inputs, chunk_size=_CHUNK_SIZE))
    except ImportError as missing:
        reason = str(missing)
    if reason:
        console.print(f"{variant} is not checked here: {reason}", style="yellow", markup=False)
        return True
    errors = {dtype: check(variant, dtype, options) for dtype in _LIMITS}
    sizes = ", ".join(f"{name} {size}" for name, size in SMALL.sizes.items())
    report = Table(title=f"{variant}: error against fp64 (rms / max, relative) at {sizes}, chunk_size {_CHUNK_SIZE}")
    report.add_column("")
    for dtype, limit in _LIMITS.items():
        report.add_column(f"{dtype}, at most {limit:.0e}", justify="right")
    for name in errors["fp32"]:
        report.add_row(name, *(written(dtype, errors[dtype][name]) for dtype in _LIMITS))
    console.print(report)
    passed = all(within(dtype, error) for dtype in _LIMITS for error in errors[dtype].values())
    console.print(f"{variant}: {'agrees' if passed else 'DOES NOT AGREE'} with fp64", style="green" if passed else "red")
    return passed


def _costs(shape: Shape, dtype: str, chunk_size: int) -> Table:
    """The cost model of one shape: the baseline's stages and the ideal operator, with floors on an H200."""
    p = shape.problem(chunk_size, DTYPES[dtype])
    result = Table(title=f"{shape.name}, {dtype}, chunk_size {chunk_size}: cost of the baseline's stages; floors on an H200")
    result.add_column("", no_wrap=True)
    for header in ("MB", "GFLOP", "exp M", "memory us", "tensor us", "exp us"):
        result.add_column(header, justify="right")
    directions = (
        ("forward", cost.forward_stages(p), cost.ideal_forward(p)),
        ("backward", cost.backward_stages(p), cost.ideal_backward(p)),
    )
    for direction, stages, ideal in directions:
        for name, c in stages.items():
            result.add_row(name, *_cost_cells(c))
        result.add_row(f"{direction}, all stages", *_cost_cells(cost.total(stages)), style="bold")
        result.add_row(f"{direction}, ideal", *_cost_cells(ideal), style="bold", end_section=True)
    return result


def _cost_cells(c: cost.Cost) -> list[str]:
    return [f"{value:.1f}" for value in (c.bytes / 1e6, c.flops / 1e9, c.exps / 1e6, *cost.H200.floors_us(c))]
