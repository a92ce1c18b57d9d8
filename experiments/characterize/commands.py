"""The commands of the characterisation, which `__main__` adds to the command line; each imports what it runs."""

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from .. import flags
from ..arguments import has_gpu, read_rows, require_gpu, split_names, split_numbers
from ..flags import VARIANTS, check_name
from ..record import RESULTS
from ..shapes import SEQLENS
from ..terminal import first_line, make_console, refuse, refuse_errors
from ..training_run import Run, make_run, parse_workload
from ..workloads import get_workload

NOISE = 0.05  # of 108 pairs of rows of mamba_ssm, whose code is one, at successive commits on an H200, 4 differ by more
_REPORT = Path("docs", "characterisation")
_VARIANTS = "baseline,fused,persistent"
_WORKLOADS = ("mamba2:1.3b,hybrid:1b,mambavision:T/mamba1,mambavision:T/ssd,"
              "graphmamba:peptides-func/mamba1,graphmamba:peptides-func/ssd")
_STEPS = 100  # of the runs' schedules; fewer are taken


def compare(
    old: Annotated[str, typer.Argument(help="A folder of rows, or a commit that rows of --out were measured at.")],
    new: Annotated[str, typer.Argument(help="Likewise.")],
    noise: Annotated[float, typer.Option(min=0, help="What two runs of the same code differ by.")] = NOISE,
    kind: Annotated[str, typer.Option("--format", help="terminal or markdown.")] = "terminal",
    fail: Annotated[bool, typer.Option("--fail", help="Exit 1 if anything is slower.")] = False,
    out: flags.Rows = RESULTS,
) -> None:
    """Times of two result sets side by side; what is slower by more than noise is marked.

    The time in a CUDA graph counts where both have one. Noise: the larger of --noise and half the widths of p20..p80.
    """
    check_name("--format", kind, ("terminal", "markdown"))
    from . import compare

    sets = []
    for name, given in (("OLD", old), ("NEW", new)):
        with refuse_errors(f"{name}: "):
            sets.append(compare.rows_of(given, out))
    with refuse_errors("compare: "):
        found = compare.compare(*sets, noise)
    if kind == "markdown":
        typer.echo(compare.markdown(found), nl=False)
    else:
        make_console().print(compare.terminal(found))
    raise typer.Exit(1 if fail and found.count("slower") else 0)


def report(
    folder: Annotated[Path, typer.Option(file_okay=False, help="Where index.html and report.md go.")] = _REPORT,
    out: flags.Rows = RESULTS,
) -> None:
    """Write the characterisation from committed rows, as one page that loads nothing and as Markdown; needs no GPU."""
    has_gpu()
    from .. import record
    from .report.build import write

    if not (rows := read_rows(lambda: record.read_gpus(out), out)):
        refuse(f"--out: got {out}, which has no row of a GPU, expected a folder with what make characterize measured")
    paths = write(folder, rows)
    typer.echo(f"{paths[0]} and {len(paths) - 1} files beside it written")


def characterize(
    workload: flags.Workloads = _WORKLOADS,
    variant: Annotated[str, typer.Option(help="Of the SSD; Mamba-1's scans run auto, and mamba_ssm if given.")] = _VARIANTS,
    dtype: flags.Autocast = "bf16", documents: flags.Documents = True, batch: flags.Batch = None,
    traces: Annotated[Path | None, typer.Option(file_okay=False, help="Folder to keep traces in, for Perfetto.")] = None,
    counters: Annotated[bool, typer.Option(help="Also count each kernel's bytes and FLOPs with ncu: minutes a run.")] = False,
    out: flags.Out = RESULTS,
) -> None:
    """Profile training steps and append what they spend their time on; and check ncu's FLOP counter where ncu is installed."""
    variants = split_names("--variant", variant, VARIANTS)
    with refuse_errors():
        runs = list(_list_runs(workload, variants, dtype, documents, batch))
    require_gpu("characterize", "make report shows the rows that there are")
    from . import collect

    console, complete = make_console(), True
    if shutil.which("ncu"):
        try:
            console.print(f"a product's FLOPs by ncu, over those it has: {collect.calibrate(out):.4f}")
        except (OSError, ValueError) as reason:
            complete = False
            console.print(f"calibration: {reason}", style="yellow", markup=False)
    for run in runs:
        name = "-".join((run.workload, run.preset, run.mixer, run.variant))
        try:
            rows = collect.append_breakdown(run, out, traces and traces / f"{name}.json")
        except Exception as reason:  # the others are measured all the same
            complete = False
            console.print(f"{name}: {first_line(reason)}", style="yellow", markup=False)
            continue
        shares = Counter()
        for row in rows:
            shares[row["operator"]] += row["share"]
        parts = ", ".join(f"{kind} {100 * share:.1f} %" for kind, share in shares.most_common())
        console.print(f"{name}: {parts}", markup=False)
        if counters:
            try:
                collect.append_counts(run, out)
            except (OSError, ValueError) as reason:
                complete = False
                console.print(f"{name}: ncu gave none: {reason}", style="yellow", markup=False)
    raise typer.Exit(0 if complete else 1)


def scaling(
    seqlen: Annotated[str, typer.Option(help="Tokens, comma-separated.")] = ",".join(map(str, SEQLENS)),
    dtype: flags.Dtype = "bf16", repeats: flags.Repeats = 20, warmup: flags.Warmup = 5, out: flags.Out = RESULTS,
) -> None:
    """Measure time and memory of a Mamba-1 and a Mamba-2 block's components over the sequence length."""
    seqlens = split_numbers("--seqlen", seqlen)
    require_gpu("scaling", "make report shows the rows that there are")
    from . import components

    rows = components.run(seqlens, dtype, out, make_console(), repeats, warmup)
    typer.echo(f"{len(rows)} rows under {out}; make report shows them")


def _list_runs(workloads: str, variants: list[str], dtype: str, documents: bool, batch: int | None = None) -> Iterator[Run]:
    """What is profiled: each workload with each variant; where its mixer is no SSD, with upstream's kernels or with ours."""
    of_scan = list(dict.fromkeys(name if name == "mamba_ssm" else "auto" for name in variants))
    for name, preset, mixer in map(parse_workload, workloads.split(",")):
        text = {"documents": documents} if get_workload(name).unit == "tokens" else {}
        run = make_run(name, preset, mixer=mixer, dtype=dtype, steps=_STEPS, batch=batch, **text)
        for variant in variants if run.mixer == "ssd" else of_scan:
            yield replace(run, variant=variant)
