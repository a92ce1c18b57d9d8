"""The commands that measure what `bench` does not, which `__main__` adds to the command line; each imports what it runs."""

from typing import Annotated

import typer

from . import arguments, flags
from .arguments import require_gpu, split_names, split_shapes
from .flags import VARIANT_LIST, VARIANTS, check_name
from .record import RESULTS
from .shapes import BLOCK_PARTS, DECODE_RIVALS, DIRECTIONS, PATCHED_MODELS, SCANS
from .terminal import make_console, refuse_errors
from .workloads import preset_names

_SCANS = {shape.name: shape for shape in SCANS}
_BLOCK_MODES = (*DIRECTIONS, "fwd_bwd")
_PROMPT_VARIANTS = [name for name in VARIANTS if name not in DECODE_RIVALS]


def block(
    part: Annotated[str, typer.Option(help=f"Parts, of {', '.join(BLOCK_PARTS)}.")] = ",".join(BLOCK_PARTS),
    shape: flags.Shape = "8b-b4,2.7b-b4,130m-b8",
    scan: Annotated[str, typer.Option(help=f"Shapes of the selective scan, of {', '.join(_SCANS)}.")] = ",".join(_SCANS),
    mode: Annotated[str, typer.Option(help=f"Modes, of {', '.join(_BLOCK_MODES)}.")] = ",".join(_BLOCK_MODES),
    dtype: flags.Dtype = "bf16", repeats: flags.Repeats = 50, warmup: flags.Warmup = 10, counters: flags.Counters = False,
    wide: flags.Wide = False, out: flags.Out = RESULTS,
) -> None:
    """Measure what surrounds the operator in a block, and whole blocks, beside upstream's where that is installed."""
    parts, modes = split_names("--part", part, BLOCK_PARTS), split_names("--mode", mode, _BLOCK_MODES)
    shapes, scans, console = split_shapes(shape), [_SCANS[name] for name in split_names("--scan", scan, _SCANS)], make_console()
    require_gpu("block", "make test ARGS=tests/block checks these kernels in the interpreter")
    from . import block, table

    rows = block.run(parts, shapes, scans, modes, dtype, out, console, repeats, warmup)
    table.show(console, rows, "medians", table.BLOCK, wide)
    if counters:
        block.count(rows, out, console)
    raise typer.Exit(0 if {row["part"] for row in rows} == set(parts) else 1)


def patches(
    model: Annotated[str, typer.Option(help=f"Of {', '.join(PATCHED_MODELS)}.")] = ",".join(PATCHED_MODELS),
    variant: Annotated[str, typer.Option(help=f"To patch with, of {', '.join(_PROMPT_VARIANTS)}.")] = "auto,persistent",
    mode: Annotated[str, typer.Option(help="fwd, fwd_bwd or both.")] = "fwd,fwd_bwd", dtype: flags.Dtype = "bf16",
    repeats: flags.Repeats = 20, warmup: flags.Warmup = 5, out: flags.Out = RESULTS,
) -> None:
    """Measure two layers of transformers' models under the patch, beside mamba_ssm's kernels where they are installed."""
    names, variants = split_names("--model", model, PATCHED_MODELS), split_names("--variant", variant, _PROMPT_VARIANTS)
    modes, console = split_names("--mode", mode, ("fwd", "fwd_bwd")), make_console()
    require_gpu("patches", "make test ARGS=tests/interop runs patched models on a CPU")
    from . import patches

    with refuse_errors():
        rows = patches.run(names, variants, modes, dtype, out, console, repeats, warmup)
    console.print(patches.tabulate(rows), markup=False)


def decode(
    preset: Annotated[str, typer.Option(help="Models, presets of the workload mamba2.")] = "130m,370m,780m,1.3b,2.7b",
    batch: Annotated[str, typer.Option(help="Sequences at a time, comma-separated.")] = "1,8,64",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 1024,
    tokens: Annotated[int, typer.Option(min=8, help="Tokens generated after the first.")] = 128,
    variant: Annotated[str, typer.Option(help=f"Of the prompt's SSD, of {', '.join(_PROMPT_VARIANTS)}.")] = "auto",
    against: Annotated[str, typer.Option(help="Libraries beside ours, or none.")] = ",".join(DECODE_RIVALS),
    dtype: flags.Dtype = "bf16", repeats: flags.Repeats = 5, wide: flags.Wide = False, out: flags.Out = RESULTS,
) -> None:
    """Measure generation by models of random weights: a prompt, and each token after it, beside other libraries."""
    rivals = [] if against == "none" else split_names("--against", against, DECODE_RIVALS, "none")
    check_name("--variant", variant, _PROMPT_VARIANTS)
    batches, console = arguments.split_numbers("--batch", batch), make_console()
    presets = split_names("--preset", preset, preset_names("mamba2"))
    require_gpu("decode", "make test ARGS=tests/experiments/test_decode.py generates with tiny models")
    from . import decode, table

    rows = decode.run(presets, batches, prompt, tokens, variant, rivals, dtype, out, console, repeats)
    table.show(console, rows, "medians", table.DECODE, wide)
    raise typer.Exit(0 if {(row["preset"], row["batch"]) for row in rows} == {(p, b) for p in presets for b in batches} else 1)


def context(
    part: Annotated[str, typer.Option(help="scan, block or both.")] = "scan,block",
    seqlen: Annotated[str, typer.Option(help="Tokens of the whole sequence; blocks up to 65536.")] = "32768,65536,262144",
    mode: Annotated[str, typer.Option(help="fwd, fwd_bwd or both.")] = "fwd,fwd_bwd",
    variant: Annotated[str, typer.Option(help=f"One of {VARIANT_LIST}.")] = "auto", dtype: flags.Dtype = "bf16",
    repeats: flags.Repeats = 20, warmup: flags.Warmup = 5, out: flags.Out = RESULTS,
) -> None:
    """Measure one sequence over several GPUs, with torchrun, beside one GPU; without two GPUs it times nothing."""
    check_name("--variant", variant, VARIANTS)
    require_gpu("context", "make test ARGS=tests/distributed checks parts of sequences on a CPU")
    from . import context
    from .parallel import join_team

    parts, modes = split_names("--part", part, context.PARTS), split_names("--mode", mode, context.MODES)
    seqlens = arguments.split_numbers("--seqlen", seqlen)
    with refuse_errors(), join_team("cp") as team:
        context.run(parts, seqlens, modes, variant, dtype, team, out, make_console(), repeats, warmup)


def documents(
    variant: Annotated[str, typer.Option(help=f"Variants, of {VARIANT_LIST}.")] = "persistent",
    shape: Annotated[str, typer.Option(help="Shapes, as of bench, whose tokens make one row.")] = "8b-b4",
    mode: Annotated[str, typer.Option(help="fwd, bwd or both.")] = "fwd,bwd", dtype: flags.Dtype = "bf16",
    mean: Annotated[int, typer.Option(min=64, max=4096, help="Tokens of a document, of 64 to 4,096.")] = 700,
    every: Annotated[str, typer.Option(help="Tokens between states that a forward is asked for, comma-separated.")] = "1024",
    against: Annotated[str, typer.Option(help="A peer to run once a document, or none.")] = "none",
    repeats: flags.Repeats = 20, warmup: flags.Warmup = 5,
    seed: Annotated[int, typer.Option(help="Of the documents' lengths.")] = 0, out: flags.Out = RESULTS,
) -> None:
    """Measure packed documents with states, and states at positions, beside one sequence of as many tokens."""
    variants, modes = split_names("--variant", variant, VARIANTS), split_names("--mode", mode, DIRECTIONS)
    shapes, intervals, console = split_shapes(shape), arguments.split_numbers("--every", every), make_console()
    check_name("--against", against, (*VARIANTS[1:], "none"))
    require_gpu("documents", "make test ARGS=tests/ssd/test_document_states.py checks documents on a CPU")
    from . import documents

    with refuse_errors():
        rows = documents.run(variants, shapes, modes, dtype, mean, intervals, None if against == "none" else against, out,
                             console, repeats, warmup, seed)
    console.print(documents.tabulate(rows), markup=False)
