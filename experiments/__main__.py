"""The command line: python -m experiments COMMAND; --help lists the commands, and COMMAND --help what each takes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

if not torch.cuda.is_available() and sys.argv[1:2] != ["train"]:  # whose steps would take minutes in the interpreter
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported, as most of the imports below may do

from ssd import Options, variant_names
from ssd.choice import CANDIDATES
from ssd.registry import get_variant, is_peer

from . import ablate as ablation
from . import block as surroundings
from . import choose as choices
from . import counters as ncu
from . import readme as readme_file
from . import record, sanitize, table
from . import sweep as sweeps
from .bench import CHUNK_SIZES, Candidate, Plan
from .bench import run as run_bench
from .characterize import commands as characterisation
from .fuzz.commands import fuzz
from .parallel import WAYS
from .reasons import refuse as _refuse
from .regress import regress
from .runs import DTYPES as TRAIN_DTYPES
from .runs import OPTIMIZERS, run_of
from .shapes import DTYPES, MODES, SHAPES, Shape, find_shapes
from .train import Interrupted, Stopped
from .train import train as run_train
from .workloads import workload_names

app = typer.Typer(no_args_is_help=True, add_completion=False, help=__doc__)

_SCANS = {shape.name: shape for shape in surroundings.SCANS}
OutOption = Annotated[Path, typer.Option(file_okay=False, help="Folder of the rows: <out>/<gpu>/<bench>.jsonl.")]


@app.command()
def bench(
    variant: Annotated[str, typer.Option(help=f"Variants to measure, of auto, {', '.join(variant_names())}.")] = "baseline",
    against: Annotated[str, typer.Option(help="The variant to compare with, or none.")] = "mamba_ssm",
    shape: Annotated[str, typer.Option(help=f"Shapes, of named, workloads, sweep, {', '.join(SHAPES)}.")] = "named",
    mode: Annotated[str, typer.Option(help=f"Modes, of {', '.join(MODES)}.")] = "fwd,bwd,fwd_bwd",
    dtype: Annotated[str, typer.Option(help=f"Dtype of x, dt, B and C: {', '.join(DTYPES)}.")] = "bf16",
    chunk_size: Annotated[str, typer.Option(help="Ours, of 16 to 256; auto measures 64, 128 and 256.")] = "auto",
    repeats: Annotated[int, typer.Option(min=2, help="Timed calls of each variant, interleaved.")] = 50,
    warmup: Annotated[int, typer.Option(min=1, help="Calls of each variant before they are timed.")] = 10,
    option: Annotated[list[str] | None, typer.Option(help="NAME=true or NAME=false, of ssd.Options; repeatable.")] = None,
    counters: Annotated[bool, typer.Option(help="Also read DRAM traffic, blocks and pipes per kernel with ncu.")] = False,
    out: OutOption = record.RESULTS,
) -> None:
    """Measure variants side by side and append a row for each; lists are separated by commas.

    Without a GPU: check the kernels against fp64 in Triton's interpreter, and print costs and the rows that there are.
    """
    variants = _each("--variant", variant, ("auto", *variant_names()))
    modes = _each("--mode", mode, MODES)
    (dtype,) = _each("--dtype", dtype, DTYPES, single=True)
    (rival,) = _each("--against", against, (*variant_names(), "none"), single=True)
    shapes, sizes, options = _shapes(shape), _chunk_sizes(chunk_size), _options(option or [])
    console = _console()
    if not torch.cuda.is_available():
        if "auto" in variants:
            _refuse("--variant: got 'auto', which is torch's form without a GPU, expected any of "
                    f"{', '.join(variant_names())}")
        from .interpret import run as run_interpreted

        raise typer.Exit(0 if run_interpreted(variants, shapes, dtype, max(sizes), options, out, console) else 1)

    plan = Plan(tuple(variants), None if rival == "none" else rival, tuple(shapes), tuple(modes), dtype, sizes, options,
                repeats, warmup, out)
    rows = run_bench(plan, console)
    console.print(table.terminal(rows, f"median times on {torch.cuda.get_device_name()}, {dtype}"))
    if counters:
        ncu.run([row for row in table.best_chunk(rows) if row["variant"] in variants], out, console)
    raise typer.Exit(0 if {row["variant"] for row in rows} >= set(variants) else 1)


@app.command()
def ablate(
    variant: Annotated[str, typer.Option(help="Variants to take apart, of those with options.")] = "fused,persistent",
    shape: Annotated[str, typer.Option(help=f"Shapes, of named, workloads, sweep, {', '.join(SHAPES)}.")] = "8b-b1,8b-b4",
    mode: Annotated[str, typer.Option(help=f"Modes, of {', '.join(MODES)}.")] = "fwd",
    dtype: Annotated[str, typer.Option(help=f"Dtype of x, dt, B and C: {', '.join(DTYPES)}.")] = "bf16",
    chunk_size: Annotated[int, typer.Option(help="One of 16 to 256.")] = 128,
    repeats: Annotated[int, typer.Option(min=2, help="Timed calls of each set of options, interleaved.")] = 50,
    warmup: Annotated[int, typer.Option(min=1, help="Calls of each before they are timed.")] = 10,
    out: OutOption = record.RESULTS,
) -> None:
    """Measure what each option of a variant is worth: without it alone, and as all are added to none, one after another.

    Without a GPU: check every set of options against fp64 in Triton's interpreter.
    """
    ours = [name for name in variant_names() if not is_peer(name)]
    variants, modes = tuple(_each("--variant", variant, ours)), tuple(_each("--mode", mode, MODES))
    (dtype,) = _each("--dtype", dtype, DTYPES, single=True)
    (size,) = _chunk_sizes(str(chunk_size))
    for name in variants:
        if not get_variant(name).options:
            _refuse(f"--variant: got {name!r}, expected a variant with options to take apart")
    shapes, console = tuple(_shapes(shape)), _console()
    if not torch.cuda.is_available():
        raise typer.Exit(0 if ablation.check(variants, console) else 1)
    rows = ablation.run(ablation.Plan(variants, shapes, modes, dtype, size, repeats, warmup, out), console)
    console.print(table.terminal(ablation.relative(rows), "relative: to every option on", table.ABLATION))


@app.command()
def block(
    part: Annotated[str, typer.Option(help=f"Parts, of {', '.join(surroundings.PARTS)}.")] = ",".join(surroundings.PARTS),
    shape: Annotated[str, typer.Option(help="Shapes, as of bench; the selective scan has its own.")] = "8b-b4,2.7b-b4,130m-b8",
    scan: Annotated[str, typer.Option(help=f"Shapes of the selective scan, of {', '.join(_SCANS)}.")] = ",".join(_SCANS),
    mode: Annotated[str, typer.Option(help=f"Modes, of {', '.join(surroundings.MODES)}.")] = "fwd,bwd,fwd_bwd",
    dtype: Annotated[str, typer.Option(help=f"Dtype of activations: {', '.join(DTYPES)}.")] = "bf16",
    repeats: Annotated[int, typer.Option(min=2, help="Timed calls of each side, interleaved.")] = 50,
    warmup: Annotated[int, typer.Option(min=1, help="Calls of each side before they are timed.")] = 10,
    counters: Annotated[bool, typer.Option(help="Also read DRAM traffic, blocks and pipes per kernel with ncu.")] = False,
    out: OutOption = record.RESULTS,
) -> None:
    """Measure what surrounds the operator in a block, and whole blocks, beside upstream's where that is installed."""
    parts, modes = _each("--part", part, surroundings.PARTS), _each("--mode", mode, surroundings.MODES)
    (dtype,) = _each("--dtype", dtype, DTYPES, single=True)
    shapes, console = tuple(_shapes(shape)), _console()
    scans = tuple(_SCANS[name] for name in _each("--scan", scan, _SCANS))
    if not torch.cuda.is_available():
        _refuse("block: needs a CUDA GPU, found none; make test ARGS=tests/block checks these kernels in the interpreter")
    plan = surroundings.Plan(tuple(parts), shapes, tuple(modes), dtype, scans, repeats, warmup, out)
    rows = surroundings.run(plan, console)
    console.print(table.terminal(rows, f"median times on {torch.cuda.get_device_name()}, {dtype}", table.BLOCK))
    if counters:
        surroundings.count(rows, out, console)
    raise typer.Exit(0 if {row["part"] for row in rows} == set(parts) else 1)


@app.command()
def train(
    workload: Annotated[str, typer.Option(help=f"One of {', '.join(workload_names())}.")] = "mamba2",
    preset: Annotated[str, typer.Option(help="Sizes of the model: tiny, for a CPU too, or a published size.")] = "tiny",
    variant: Annotated[str, typer.Option(help=f"Of the SSD: auto, {', '.join(variant_names())}.")] = "auto",
    mixer: Annotated[str | None, typer.Option(help="What mixes tokens, where a workload has several; its first.")] = None,
    data: Annotated[str, typer.Option(help="synthetic, or a path or name, see docs/workloads.md.")] = "synthetic",
    tokenizer: Annotated[str, typer.Option(help="Of text: bytes, a tokenizer.json or its folder, a model's name.")] = "bytes",
    documents: Annotated[bool, typer.Option(help="Documents that share a row of text see nothing of each other.")] = True,
    steps: Annotated[int, typer.Option(help="Of the optimizer.")] = 100,
    batch: Annotated[int | None, typer.Option(help="Samples of a micro-batch; the preset's unless given.")] = None,
    seqlen: Annotated[int | None, typer.Option(help="Tokens of a sample; the preset's unless given.")] = None,
    accumulate: Annotated[int, typer.Option(help="Micro-batches of a step.")] = 1,
    lr: Annotated[float | None, typer.Option(help="The highest learning rate; the preset's unless given.")] = None,
    warmup: Annotated[int | None, typer.Option(help="Steps up to it; a tenth unless given.")] = None,
    clip: Annotated[float, typer.Option(help="The gradient's largest norm; 0 for none.")] = 1.0,
    optimizer: Annotated[str | None, typer.Option(help=f"{' or '.join(OPTIMIZERS)}; the preset's unless given.")] = None,
    weight_decay: Annotated[float | None, typer.Option(help="On matrices and filters; the preset's unless given.")] = None,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(TRAIN_DTYPES)}; bf16 by autocast.")] = "fp32",
    checkpoint_activations: Annotated[bool, typer.Option("--checkpoint-activations", help="Keep less, compute more.")] = False,
    compile: Annotated[bool, typer.Option("--compile", help="Run the model through torch.compile.")] = False,
    seed: Annotated[int, typer.Option(help="Of weights and data.")] = 0,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints; the last two are kept.")] = 1000,
    out: Annotated[Path | None, typer.Option(
        file_okay=False, help="Folder of the run; runs/<workload>-<preset>-<mixer>-<variant>-<seed> unless given.")] = None,
    rows: Annotated[Path | None, typer.Option(
        file_okay=False, help="Folder of the run's row; unless given, the results with a GPU, the run's own without.")] = None,
    parallel: Annotated[str, typer.Option(help=f"With torchrun, a process for each GPU: {' or '.join(WAYS)}.")] = "ddp",
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in the folder.")] = False,
) -> None:
    """Train a workload: log.jsonl and checkpoints in the run's folder, and a row at the end."""
    console = _console()
    try:
        run = run_of(workload, preset, variant=variant, mixer=mixer, data=data, tokenizer=tokenizer, documents=documents,
                     steps=steps, batch=batch, seqlen=seqlen, accumulate=accumulate, lr=lr, warmup=warmup, clip=clip,
                     optimizer=optimizer, weight_decay=weight_decay, dtype=dtype,
                     checkpoint_activations=checkpoint_activations, compile=compile, seed=seed, save_every=save_every)
        out = out or Path("runs", f"{workload}-{preset}-{run.mixer}-{variant}-{seed}")
        run_train(run, out, console, resume, rows, parallel)
    except (ImportError, OSError, Stopped, ValueError) as reason:
        _refuse(str(reason))
    except Interrupted as reason:
        if os.environ.get("RANK", "0") == "0":
            console.print(str(reason), style="yellow")
        raise typer.Exit(128 + reason.number) from None


@app.command()
def sweep(
    workload: Annotated[str, typer.Option(help=sweeps.NAMES)] = "mamba2",
    variant: Annotated[str, typer.Option(help=f"To put inside, of auto, {', '.join(variant_names())}.")] = ",".join(
        ("mamba_ssm", *CANDIDATES)),
    steps: Annotated[int, typer.Option(help="Of each training that the losses are taken from.")] = 200,
    dtype: Annotated[str, typer.Option(help=f"One of {', '.join(TRAIN_DTYPES)}; bf16 by autocast.")] = "bf16",
    data: Annotated[str, typer.Option(help="As of train.")] = "synthetic",
    documents: Annotated[bool, typer.Option(help="As of train.")] = True,
    batch: Annotated[int | None, typer.Option(help="Samples of a micro-batch; each preset's unless given.")] = None,
    optimizer: Annotated[str | None, typer.Option(help=f"{' or '.join(OPTIMIZERS)}; each preset's unless given.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights and data.")] = 0,
    repeats: Annotated[int, typer.Option(min=2, help="Timed steps of each variant, interleaved.")] = 20,
    warmup: Annotated[int, typer.Option(min=1, help="Steps of each before they are timed.")] = 3,
    each_option: Annotated[bool, typer.Option("--each-option", help="Also time each variant without each option.")] = False,
    folder: Annotated[Path, typer.Option(file_okay=False, help="Of the training runs' folders.")] = Path("runs"),
    out: OutOption = record.RESULTS,
    again: Annotated[bool, typer.Option("--again", help="Run what has its row, too.")] = False,
    trains: Annotated[bool, typer.Option("--train/--no-train", help="Also train with each, for its loss.")] = True,
    counters: Annotated[bool, typer.Option(help="Also count bytes of a step's SSM kernels with ncu.")] = False,
) -> None:
    """Put variant after variant inside workloads: step times, side by side, and losses.

    What has its row is not run again. Without a GPU the variants auto and torch can run.
    """
    variants, console = _each("--variant", variant, ("auto", *variant_names())), _console()
    try:
        runs = [run_of(name, preset, mixer=mixer, data=data, documents=documents, steps=steps, batch=batch, optimizer=optimizer,
                       dtype=dtype, seed=seed, save_every=0)
                for name, preset, mixer in map(sweeps.parsed, workload.split(","))]
        plan = sweeps.Plan(tuple(runs), tuple(variants), each_option, repeats, warmup, folder, out, again, trains, counters)
        failed = sweeps.run(plan, console)
    except ValueError as reason:
        _refuse(str(reason))
    except Interrupted as reason:
        console.print(f"{reason.number.name}: what was in progress is saved; the same command goes on", style="yellow")
        raise typer.Exit(128 + reason.number) from None
    found = [row for row in sweeps.committed(out) if row["workload"] in {run.workload for run in runs}]
    console.print(table.terminal(found, "median times of a training step", table.STEPS))
    for line in failed:
        console.print(f"left out: {line}", style="yellow", markup=False)
    raise typer.Exit(1 if failed else 0)


@app.command("table")
def render_table(
    bench: Annotated[str, typer.Option(help="Rows of ssd, which compares variants, ablate, block, step, or counters.")] = "ssd",
    kind: Annotated[str, typer.Option("--format", help=f"One of {', '.join(table.FORMATS)}.")] = "markdown",
    variant: Annotated[str, typer.Option(help="Only these variants.")] = "",
    shape: Annotated[str, typer.Option(help="Only these shapes.")] = "",
    mode: Annotated[str, typer.Option(help="Only these modes.")] = "",
    all_chunks: Annotated[bool, typer.Option(help="Every chunk size instead of the fastest.")] = False,
    kernels: Annotated[bool, typer.Option("--kernels", help="Of counters: a line for each kernel too.")] = False,
    out: OutOption = record.RESULTS,
) -> None:
    """Print the latest row of each variant, shape and mode."""
    (kind,) = _each("--format", kind, table.FORMATS, single=True)
    variants = _each("--variant", variant, ("auto", *variant_names())) if variant else None
    modes = _each("--mode", mode, MODES) if mode else None
    shapes = [s.name for s in _shapes(shape)] if shape else None
    (bench,) = _each("--bench", bench, ("ssd", "ablate", "block", "step", "counters"), single=True)
    if kernels and bench != "counters":
        _refuse(f"--kernels: got --bench {bench}, expected --bench counters")
    read, columns = {
        "ssd": (lambda: table.committed(out, all_chunks), table.COLUMNS),
        "ablate": (lambda: ablation.committed(out), table.ABLATION),
        "block": (lambda: surroundings.committed(out), table.BLOCK),
        "step": (lambda: sweeps.committed(out), table.STEPS),
        "counters": (lambda: ncu.committed(out, kernels), table.COUNTERS_BY_KERNEL if kernels else table.COUNTERS),
    }[bench]
    rows = [
        row
        for row in _rows(read, out)
        if all(wanted is None or row.get(key) in wanted
               for key, wanted in (("variant", variants), ("shape", shapes), ("mode", modes)))
    ]
    typer.echo(table.render(rows, kind, columns), nl=False)


@app.command()
def readme(
    check: Annotated[bool, typer.Option(help="Change nothing; exit 1 if the README or a figure is out of date.")] = False,
    out: OutOption = record.RESULTS,
) -> None:
    """Write the tables and figures of README and docs from committed rows."""
    current = _rows(lambda: readme_file.write_all(out, check=check), out)
    typer.echo("README is up to date" if current else "README is out of date" if check else "README written")
    raise typer.Exit(1 if check and not current else 0)


@app.command()
def tune(
    shape: Annotated[str, typer.Option(help="Shapes to tune for; a later one replaces what they share.")] = "8b-b4",
    dtype: Annotated[str, typer.Option(help=f"Dtype of x, dt, B and C: {', '.join(DTYPES)}.")] = "bf16",
    chunk_size: Annotated[str, typer.Option(help="Of 16 to 256; auto tunes for 64, 128 and 256.")] = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls of each config.")] = 10,
) -> None:
    """Time every config of every baseline kernel on this GPU and freeze the fastest in ssd/configs/<gpu>.json."""
    (dtype,) = _each("--dtype", dtype, DTYPES, single=True)
    shapes, sizes = _shapes(shape), _chunk_sizes(chunk_size)
    if not torch.cuda.is_available():
        _refuse("tune: needs a CUDA GPU, found none")
    from .tune import run as run_tune

    run_tune(shapes, dtype, sizes, repeats, Console())


@app.command()
def choose(out: OutOption = record.RESULTS) -> None:
    """Write what variant "auto" chooses by, ssd/configs/variants/<gpu>.json, from committed rows."""
    found = choices.tables(_rows(lambda: record.read(out, bench="ssd"), out))
    for path in choices.write(found):
        typer.echo(f"{path} written: {len(found[path.stem])} measured calls")
    for gpu in sorted(gpu for gpu, calls in found.items() if not calls):
        typer.echo(f"{gpu}: nothing to choose by: no call that two of {', '.join(CANDIDATES)} were measured in")


@app.command("sanitize")
def sanitize_kernels(
    variant: Annotated[str, typer.Option(
        help=f"Of {', '.join(sanitize.VARIANTS)}; all, but control on Hopper alone.")] = "",
    tool: Annotated[str, typer.Option(help=f"Tools of compute-sanitizer, of {', '.join(sanitize.TOOLS)}.")] = ",".join(
        sanitize.TOOLS),
    out: OutOption = record.RESULTS,
) -> None:
    """Run every kernel of the variants under compute-sanitizer, and append a row for each tool; exit 1 if it finds anything but
    Triton's own start of the roles, which the control is there to show alone.
    """
    variants, tools = _each("--variant", variant, sanitize.VARIANTS) if variant else [], _each("--tool", tool, sanitize.TOOLS)
    if not torch.cuda.is_available():
        _refuse("sanitize: needs a CUDA GPU, found none")
    try:
        clean = sanitize.run(variants or sanitize.variants_here(), tools, out, _console())
    except (FileNotFoundError, ValueError) as reason:
        _refuse(f"sanitize: {reason}")
    raise typer.Exit(0 if clean else 1)


@app.command(hidden=True)
def profiled(
    variant: str, shape: str, mode: str, dtype: str, chunk_size: int, option: Annotated[list[str] | None, typer.Option()] = None
) -> None:
    """One call between the profiler's start and stop: what `bench --counters` runs under ncu."""
    ncu.profiled(Candidate(variant, chunk_size, _options(option or [])), shape, mode, dtype)


def _rows(read: Callable[[], Any], out: Path) -> Any:
    """What `read` finds in the folder `out`; refused where there is no such folder, or a line in it is no row."""
    if not out.is_dir():
        _refuse(f"--out: got {out}, expected a folder that exists")
    try:
        return read()
    except ValueError as reason:
        _refuse(f"--out: {reason}")


def _each(option: str, text: str, known: Iterable[str], *also: str, single: bool = False) -> list[str]:
    """The items of a comma-separated list, or the one item; refused if not known. `also`: accepted by the caller."""
    known = list(known)
    items = [text] if single else list(dict.fromkeys(text.split(",")))
    for item in items:
        if item not in known:
            _refuse(f"{option}: got {item!r}, expected {'one of' if single else 'any of'} {', '.join((*known, *also))}")
    return items


def _shapes(names: str) -> list[Shape]:
    try:
        return find_shapes(names)
    except ValueError as reason:
        _refuse(f"--{reason}")


def _options(items: list[str]) -> Options:
    names, changed = [f.name for f in fields(Options)], {}
    for item in items:
        name, _, value = item.partition("=")
        if name not in names or value not in ("true", "false"):
            _refuse(f"--option: got {item!r}, expected NAME=true or NAME=false with a name of {', '.join(names)}")
        changed[name] = value == "true"
    return Options(**changed)


def _console() -> Console:
    return Console(width=max(140, Console().width))  # narrower, a table of results loses its numbers


def _chunk_sizes(text: str) -> tuple[int, ...]:
    if text == "auto":
        return CHUNK_SIZES
    return tuple(map(int, _each("--chunk-size", text, [str(2**n) for n in range(4, 9)], "auto")))


for command in (characterisation.compare, characterisation.report, characterisation.characterize,
                characterisation.scaling, fuzz, regress):
    app.command()(command)
for command in (characterisation.profiled_product, characterisation.profiled_step, sanitize.sanitized):
    app.command(hidden=True)(command)
app.command("profiled-part", hidden=True)(surroundings.profiled)

if __name__ == "__main__":
    app()
