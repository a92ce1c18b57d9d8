"""The commands of pruning, which `__main__` adds to the command line; each imports what it runs."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from .. import flags
from ..arguments import require_gpu, split_names, split_numbers
from ..flags import VARIANT_LIST, VARIANTS, check_name, require_writable
from ..record import RESULTS
from ..shapes import SEQLENS
from ..terminal import make_console, refuse_errors
from ..training_run import Run, make_run, parse_workload

# as `ssd.pruning` has them, which imports torch
KINDS, SCORES = ("states", "heads"), ("activity", "energy", "magnitude", "random")
PARTS = ("mamba1", "mamba2", "model", "step")  # as `speed` has them
_split_ratios = partial(split_numbers, "--ratio", kind=float, below=1,
                        expected="numbers of more than 0 and less than 1, commas between")
_Ratio = Annotated[str, typer.Option(help="Parts that are removed, each more than 0 and less than 1.")]
_Kind = Annotated[str, typer.Option(callback=lambda kind: check_name("--kind", kind, KINDS),
                                    help=f"What is removed: {' or '.join(KINDS)}.")]


def prune(
    workload: flags.Workloads = "mamba2", ratio: _Ratio = "0.5", kind: _Kind = KINDS[0],
    score: Annotated[str, typer.Option(help=f"By which it is chosen, of {', '.join(SCORES)}.")] = ",".join(SCORES),
    variant: Annotated[str, typer.Option(help=f"Of the SSD: {VARIANT_LIST}.")] = Run.variant,
    steps: Annotated[int, typer.Option(help="Steps of training the whole model, unless it has taken them.")] = 100,
    finetune: Annotated[int, typer.Option(min=0, help="Steps of fine-tuning each pruned one; 0 for none.")] = 20,
    calibration: Annotated[int, typer.Option(min=1, help="Micro-batches that scores and bridges are taken from.")] = 8,
    evaluation: Annotated[int, typer.Option(min=1, help="Micro-batches that losses are means over.")] = 8,
    bridge: Annotated[bool, typer.Option(help="Fit each pruned block's output to the whole one's.")] = True,
    trained: Annotated[Path | None, typer.Option(
        file_okay=False, help="Folder of a run of make train to prune, whose settings then count.")] = None,
    data: flags.Data = Run.data, documents: flags.Documents = Run.documents, batch: flags.Batch = None,
    seqlen: Annotated[int | None, typer.Option(help="Tokens of a sample; the preset's unless given.")] = None,
    dtype: flags.Autocast = Run.dtype, seed: flags.Seed = Run.seed,
    again: Annotated[bool, typer.Option("--again", help="Also run what has its row.")] = False, wide: flags.Wide = False,
    out: Annotated[Path | None, typer.Option(
        file_okay=False, help="Folder of the rows; unless given, the results with a GPU, the run's own without. Models go to "
                              "runs/prune-... in any case.")] = None,
) -> None:
    """Train a workload, remove its least active states, bridge, fine-tune, and append a row with the losses for each."""
    scores, ratios, console = tuple(split_names("--score", score, SCORES)), _split_ratios(ratio), make_console()
    with refuse_errors():
        check_name("--variant", variant, VARIANTS)
        name, preset, mixer = parse_workload(workload)
        run = make_run(name, preset, mixer=mixer, variant=variant, data=data, documents=documents, steps=steps, batch=batch,
                       seqlen=seqlen, dtype=dtype, seed=seed)
        folder = trained or Path("runs", f"prune-{name}-{preset}-{run.mixer}-{variant}-{seed}")
        require_writable(out or folder)
    from .. import table
    from ..train import Interrupted, Stopped
    from . import losses

    try:
        with refuse_errors("", Stopped):
            run = losses.read_run(trained) if trained else run
            rows = losses.run(losses.Plan(run, folder, kind, ratios, scores, finetune, calibration, evaluation, bridge, out,
                                          again), console)
    except Interrupted as reason:
        console.print(f"{reason.saved}; the same command goes on", style="yellow")
        raise typer.Exit(128 + reason.number) from None
    table.show(console, rows, f"losses of {run.workload} {run.preset}", table.PRUNING, wide)


def prune_speed(
    workload: flags.Workloads = "mamba2:1.3b", ratio: _Ratio = "0.125,0.25,0.5", kind: _Kind = KINDS[0],
    part: Annotated[str, typer.Option(help=f"Parts, of {', '.join(PARTS)}.")] = ",".join(PARTS),
    seqlen: Annotated[str, typer.Option(help="Tokens of a sample, comma-separated.")] = ",".join(map(str, SEQLENS)),
    batch: Annotated[int, typer.Option(min=1, help="Samples.")] = 1,
    variant: Annotated[str, typer.Option(help=f"Of the SSD: {VARIANT_LIST}.")] = Run.variant,
    dtype: flags.Autocast = "bf16", repeats: flags.Repeats = 20, warmup: flags.Warmup = 5, wide: flags.Wide = False,
    out: flags.Out = RESULTS,
) -> None:
    """Measure time and memory of blocks, a model and its training step without part of their states, by sequence length."""
    parts, ratios, seqlens = tuple(split_names("--part", part, PARTS)), _split_ratios(ratio), split_numbers("--seqlen", seqlen)
    with refuse_errors():
        check_name("--variant", variant, VARIANTS)
        name, preset, mixer = parse_workload(workload)
        run = make_run(name, preset, mixer=mixer, variant=variant, batch=batch, dtype=dtype)
    require_gpu("prune-speed", "make prune measures losses on a CPU, too")
    from .. import table
    from . import speed

    console = make_console()
    rows = speed.run(speed.Plan(run, kind, ratios, parts, seqlens, repeats, warmup, out), console)
    table.show(console, rows, "medians, speed-up over the whole", table.PRUNING_SPEED, wide)
