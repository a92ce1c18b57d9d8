"""The commands of the characterisation, which `__main__` adds to the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .. import record
from ..reasons import refuse
from . import compare as comparing

_REPORT = Path("build", "report")  # git ignores it: rows are what is kept
_OutOption = Annotated[Path, typer.Option(file_okay=False, help="Folder of the rows: <out>/<gpu>/<bench>.jsonl.")]


def compare(
    old: Annotated[str, typer.Argument(help="A folder of rows, or a commit that rows of --out were measured at.")],
    new: Annotated[str, typer.Argument(help="Likewise.")],
    noise: Annotated[float, typer.Option(min=0, help="What two runs of the same code differ by.")] = comparing.NOISE,
    kind: Annotated[str, typer.Option("--format", help="terminal or markdown.")] = "terminal",
    fail: Annotated[bool, typer.Option("--fail", help="Exit 1 if anything is slower.")] = False,
    out: _OutOption = record.RESULTS,
) -> None:
    """Times of two result sets side by side; what is slower by more than noise is marked.

    The time in a CUDA graph counts where both have one. Noise: the larger of --noise and half the widths of p20..p80.
    """
    if kind not in ("terminal", "markdown"):
        refuse(f"--format: got {kind!r}, expected terminal or markdown")
    sets = []
    for name, given in (("OLD", old), ("NEW", new)):
        try:
            sets.append(comparing.rows_of(given, out))
        except (FileNotFoundError, ValueError) as reason:
            refuse(f"{name}: {reason}")
    try:
        found = comparing.compare(*sets, noise)
    except ValueError as reason:
        refuse(f"compare: {reason}")
    if kind == "markdown":
        typer.echo(comparing.markdown(found), nl=False)
    else:
        console = Console()
        console.width = max(160, console.width)  # narrower, numbers would fold
        console.print(comparing.terminal(found))
    raise typer.Exit(1 if fail and found.count("slower") else 0)


def report(
    folder: Annotated[Path, typer.Option(file_okay=False, help="Where index.html and report.md go.")] = _REPORT,
    out: _OutOption = record.RESULTS,
) -> None:
    """Write the characterisation from committed rows, as one page that loads nothing and as Markdown; needs no GPU."""
    if not out.is_dir():
        refuse(f"--out: got {out}, expected a folder that exists")
    from .report.build import write  # draws, so it needs matplotlib

    try:
        paths = write(folder, out)
    except ValueError as reason:
        refuse(f"--out: {reason}")
    typer.echo(f"{paths[0]} and {len(paths) - 1} files beside it written")
