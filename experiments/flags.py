"""The flags that several commands have, as types of their parameters. Imports no torch."""

from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from .known_names import refuse_unknown, variant_names
from .record import RESULTS
from .shapes import ITEMSIZES, MODES
from .terminal import refuse, refuse_errors
from .training_run import DTYPES, OPTIMIZERS
from .workloads import workload_names

VARIANTS = ("auto", *variant_names())
VARIANT_LIST = ", ".join(VARIANTS)
Shape = Annotated[str, typer.Option(help="Shapes, of named, workloads, sweep, models, single ones of theirs, or sizes as "
                                         "2x4096x24x64x128x1: batch, seqlen, nheads, headdim, dstate, ngroups.")]
Mode = Annotated[str, typer.Option(help=f"Modes, of {', '.join(MODES)}.")]
Dtype = Annotated[str, typer.Option(callback=lambda dtype: check_name("--dtype", dtype, ITEMSIZES),
                                    help=f"Dtype of activations: {', '.join(ITEMSIZES)}.")]
Repeats = Annotated[int, typer.Option(min=2, help="Timed calls of each candidate; candidates take turns.")]
Warmup = Annotated[int, typer.Option(min=1, help="Calls of each candidate before timing.")]
_FOLDER = "Folder of the rows: <out>/<gpu>/<bench>.jsonl."
_RESULTS = str(RESULTS.relative_to(RESULTS.parents[1]))  # as --help shows the default
Rows = Annotated[Path, typer.Option(file_okay=False, help=_FOLDER, show_default=_RESULTS)]  # where rows are read
Out = Annotated[Path, typer.Option(file_okay=False, help=_FOLDER, show_default=_RESULTS,
                                   callback=lambda out: require_writable(out))]
Wide = Annotated[bool, typer.Option("--wide", help="Show every column, beyond 100 characters.")]
Counters = Annotated[bool, typer.Option(help="Also read DRAM traffic, blocks and pipes of each kernel with ncu.")]
ChunkSizes = Annotated[str, typer.Option(help="Ours, of 16 to 256; auto stands for 64, 128 and 256.")]

# of what is trained, see `training_run.Run`
Workloads = Annotated[str, typer.Option(help=f"NAME, NAME:PRESET or NAME:PRESET/MIXER, of {', '.join(workload_names())}.")]
Autocast = Annotated[str, typer.Option(callback=lambda dtype: check_name("--dtype", dtype, DTYPES),
                                       help=f"One of {', '.join(DTYPES)}; bf16 by autocast.")]
Data = Annotated[str, typer.Option(help="synthetic, or a path or name, see docs/workloads.md.")]
Documents = Annotated[bool, typer.Option(help="Keep documents that share a row of text apart.")]
Batch = Annotated[int | None, typer.Option(help="Samples of a micro-batch; the preset's unless given.")]
Optimizer = Annotated[str | None, typer.Option(callback=lambda name: name and check_name("--optimizer", name, OPTIMIZERS),
                                               help=f"{' or '.join(OPTIMIZERS)}; the preset's unless given.")]
Buckets = Annotated[int | None, typer.Option(help="Of graphs: fill batches up to so many sizes a doubling; none unless given.")]
Compile = Annotated[bool, typer.Option("--compile", help="Run the layers through torch.compile.")]
Graph = Annotated[bool | None, typer.Option("--graph/--no-graph", help="Replay steps as CUDA graphs: the same bits, without "
                                            "waiting for the host. Unless given, where a run's steps can be.")]
Seed = Annotated[int, typer.Option(help="Of weights and data.")]


def check_name(option: str, name: str, known: Iterable[str]) -> str:
    """The name; refused if it is not known."""
    with refuse_errors():
        refuse_unknown(option, name, known)
    return name


def require_writable(out: Path, flag: str = "--out") -> Path:
    """Refuses a folder of rows that cannot be made or written to, before anything is measured for it."""
    nearest = out.absolute()
    try:  # os.access says yes to root even where nothing can be made, as in /proc
        while not (nearest.exists() or nearest.is_symlink()):
            nearest = nearest.parent
        with TemporaryDirectory(dir=nearest):
            return out
    except OSError:
        refuse(f"{flag}: got {out}, expected a folder that can be written: {nearest} cannot")
