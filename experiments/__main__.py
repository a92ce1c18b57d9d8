"""The command line: python -m experiments COMMAND; --help lists the commands, and COMMAND --help what each takes.

A command imports what it runs when it runs: torch and pandas take seconds that --help and a mistyped name need not wait.
"""

import json
import os
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated

try:
    import typer
    from typer.core import TyperGroup
except ModuleNotFoundError as missing:
    raise SystemExit(f"python -m experiments needs {missing.name}: pip install '.[bench]', or after `make setup` take "
                     ".venv/bin/python") from None

from . import flags
from .arguments import has_gpu, parse_options, read_rows, require_gpu, split_chunk_sizes, split_names, split_shapes
from .characterize import commands as characterisation
from .flags import VARIANT_LIST, VARIANTS, check_name, require_writable
from .fuzz.commands import fuzz
from .other_benches import block, context, decode, documents, patches
from .pruning.commands import prune, prune_speed
from .record import RESULTS
from .regress import regress
from .shapes import MODES
from .terminal import make_console, refuse, refuse_errors
from .training_run import WAYS, Run, make_run, parse_workload
from .workloads import workload_names


class Commands(TyperGroup):
    """Says what is refused of a number in one line, as everything else."""

    def invoke(self, context: typer.Context) -> object:
        try:
            return super().invoke(context)
        except typer.BadParameter as error:
            if not hasattr(error.__cause__, "errors"):  # pydantic's
                raise
            found = error.__cause__.errors()[0]
            expected = found["msg"].removeprefix("Input should be ").partition(",")[0]
            for long, short in (("greater than or equal to", "at least"), ("less than or equal to", "at most")):
                expected = expected.replace(long, short)
            refuse(f"{error.param.opts[0]}: got {found['input']}, expected {expected}")


app = typer.Typer(no_args_is_help=True, add_completion=False, cls=Commands)

# of `table`: whose `read_latest` gives a bench's rows, and the columns of `table` that show them
_TABLES = {"ssd": ("table", "COLUMNS"), "ablate": ("ablate", "ABLATION"), "block": ("block", "BLOCK"),
           "decode": ("decode", "DECODE"), "step": ("sweep", "STEPS"), "prune": ("pruning.losses", "PRUNING"),
           "prune_speed": ("pruning.speed", "PRUNING_SPEED"), "counters": ("counters", "COUNTERS")}
_TOOLS = ("memcheck", "racecheck")
_FORMATS = ("markdown", "csv", "latex")


@app.callback(help=__doc__.splitlines()[0])
def refuse_ranks(context: typer.Context) -> None:
    """Several processes of one command that each measure would disturb each other, and write rows for one machine."""
    ranks = os.environ.get("WORLD_SIZE", "1")
    if ranks != "1" and context.invoked_subcommand not in ("train", "context"):
        refuse(f"torchrun: got {ranks} processes of {context.invoked_subcommand}, expected one; train and context take several")


@app.command()
def bench(
    variant: Annotated[str, typer.Option(help=f"Variants to measure, of {VARIANT_LIST}.")] = "baseline",
    against: Annotated[str, typer.Option(
        help=f"The variant to compare with, of {', '.join(VARIANTS[1:])}, or none.")] = "mamba_ssm",
    shape: flags.Shape = "named", mode: flags.Mode = "fwd,bwd,fwd_bwd", dtype: flags.Dtype = "bf16",
    chunk_size: flags.ChunkSizes = "auto", repeats: flags.Repeats = 50, warmup: flags.Warmup = 10,
    option: Annotated[list[str] | None, typer.Option(
        help="NAME=true, NAME=false or keep_bytes=NUMBER, of ssd.Options; repeatable.")] = None,
    also: Annotated[list[str] | None, typer.Option(
        help="Measure ours with these options too, in the same run: as --option takes them, separated by commas, beside those; "
             "repeatable.")] = None,
    counters: flags.Counters = False, wide: flags.Wide = False, out: flags.Out = RESULTS,
) -> None:
    """Measure variants side by side and append a row for each; lists are separated by commas.

    Without a GPU: check the kernels against fp64 in Triton's interpreter, and print costs beside the rows that there are.
    """
    variants, modes = split_names("--variant", variant, VARIANTS), split_names("--mode", mode, MODES)
    check_name("--against", against, (*VARIANTS[1:], "none"))
    shapes, sizes, console, on_gpu = split_shapes(shape), split_chunk_sizes(chunk_size), make_console(), has_gpu()
    options = [parse_options(option), *(parse_options([*(option or ()), *items.split(",")], "--also") for items in also or ())]
    if not on_gpu:
        if "auto" in variants:
            refuse("--variant: got 'auto', which needs a GPU (without one it is 'torch'), expected any of "
                   f"{', '.join(VARIANTS[1:])}")
        if counters:
            require_gpu("--counters")
        from . import interpret

        passed = interpret.run(variants, shapes, modes, dtype, max(sizes), options, out, console, wide)
        raise typer.Exit(0 if passed else 1)

    from . import bench, table
    from . import counters as ncu

    rows = bench.run(variants, None if against == "none" else against, shapes, modes, dtype, sizes, options, out, console,
                     repeats, warmup)
    table.show(console, rows, "medians", wide=wide)
    if counters:
        ncu.run([row for row in table.keep_best_chunk(rows) if row["variant"] in variants], out, console)
    raise typer.Exit(0 if {row["variant"] for row in rows} >= set(variants) else 1)


@app.command()
def ablate(
    variant: Annotated[str, typer.Option(help="Variants to take apart, of those with options.")] = "fused,persistent",
    shape: flags.Shape = "8b-b1,8b-b4", mode: flags.Mode = "fwd", dtype: flags.Dtype = "bf16",
    chunk_size: Annotated[int, typer.Option(help="One of 16 to 256.")] = 128, repeats: flags.Repeats = 50,
    warmup: flags.Warmup = 10, wide: flags.Wide = False, out: flags.Out = RESULTS,
) -> None:
    """Measure what each option of a variant is worth: turned off alone, and turned on after all those before it.

    Without a GPU: check what the modes compute with every set of options against fp64, in Triton's interpreter.
    """
    variants, modes = split_names("--variant", variant, VARIANTS[1:]), tuple(split_names("--mode", mode, MODES))
    (size,), shapes, console, on_gpu = split_chunk_sizes(str(chunk_size)), split_shapes(shape), make_console(), has_gpu()
    from ssd.registry import get_variant, is_peer

    from . import ablate, table

    for name in variants:
        if is_peer(name) or not get_variant(name).options:
            refuse(f"--variant: got {name!r}, expected a variant with options to take apart")
    if not on_gpu:
        raise typer.Exit(0 if ablate.check(variants, modes, console) else 1)
    rows = ablate.run(variants, shapes, modes, dtype, size, out, console, repeats, warmup)
    table.show(console, ablate.add_relative(rows), "time relative to that with every option", table.ABLATION, wide)


@app.command()
def train(
    workload: Annotated[str, typer.Option(help=f"One of {', '.join(workload_names())}.")] = "mamba2",
    preset: Annotated[str, typer.Option(help="Sizes of the model: tiny, for a CPU too, or a published size.")] = "tiny",
    variant: Annotated[str, typer.Option(
        help=f"One of {VARIANT_LIST}; with mixer mamba1 one of auto, torch, mamba_ssm.")] = Run.variant,
    mixer: Annotated[str | None, typer.Option(help="What mixes tokens, where a workload has several; its first.")] = None,
    data: flags.Data = Run.data,
    tokenizer: Annotated[str, typer.Option(
        help="Of text: bytes, a tokenizer.json or its folder, a model's name.")] = Run.tokenizer,
    documents: flags.Documents = Run.documents,
    steps: Annotated[int, typer.Option(help="Steps of the optimizer.")] = 100, batch: flags.Batch = None,
    seqlen: Annotated[int | None, typer.Option(help="Tokens of a sample; the preset's unless given.")] = None,
    accumulate: Annotated[int, typer.Option(help="Micro-batches of a step.")] = Run.accumulate,
    lr: Annotated[float | None, typer.Option(help="The highest learning rate; the preset's unless given.")] = None,
    warmup: Annotated[int | None, typer.Option(help="Steps up to it; a tenth unless given.")] = None,
    clip: Annotated[float, typer.Option(help="The gradient's largest norm; 0 for none.")] = Run.clip,
    optimizer: flags.Optimizer = None,
    weight_decay: Annotated[float | None, typer.Option(help="On matrices and filters; the preset's unless given.")] = None,
    dtype: flags.Autocast = Run.dtype,
    checkpoint_activations: Annotated[bool, typer.Option("--checkpoint-activations", help="Keep less, compute more.")] = False,
    compile: flags.Compile = False,
    seed: flags.Seed = Run.seed,
    save_every: Annotated[int, typer.Option(help="Steps between checkpoints; the last two are kept.")] = Run.save_every,
    out: Annotated[Path | None, typer.Option(
        file_okay=False, help="Folder of the run; runs/<workload>-<preset>-<mixer>-<variant>-<seed> unless given.")] = None,
    rows: Annotated[Path | None, typer.Option(
        file_okay=False, help="Folder of the run's row; unless given, the results with a GPU, the run's own without.")] = None,
    start: Annotated[str | None, typer.Option(help="Folder of a pruned model to start with, see docs/pruning.md.")] = None,
    parallel: Annotated[str, typer.Option(help=f"With torchrun, a process for each GPU: {' or '.join(WAYS)}.")] = "ddp",
    buckets: flags.Buckets = None, graph: flags.Graph = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in the folder.")] = False,
) -> None:
    """Train a workload: log.jsonl and checkpoints in the run's folder, and a row at the end."""
    given = {name: value for name, value in locals().items() if name not in ("out", "rows", "parallel", "graph", "resume")}
    console = make_console()
    with refuse_errors():
        check_name("--variant", variant, VARIANTS), check_name("--parallel", parallel, WAYS)
        if parallel != "ddp" and "LOCAL_RANK" not in os.environ:
            raise ValueError(f"--parallel: got {parallel} and one process, expected several, by torchrun: make train GPUS=2")
        run = make_run(**given)
        out = require_writable(out or Path("runs", f"{workload}-{preset}-{run.mixer}-{variant}-{seed}"))
        from .train import Interrupted, Stopped, train
    try:
        with refuse_errors("", Stopped):
            train(run, out, console, resume, rows and require_writable(rows, "--rows"), parallel, graph)
    except Interrupted as reason:
        if os.environ.get("RANK", "0") == "0":
            console.print(str(reason), style="yellow")
        raise typer.Exit(128 + reason.number) from None


@app.command()
def export(
    run: Annotated[Path, typer.Option("--from", file_okay=False, help="Folder of a run of `train`.")],
    to: Annotated[Path, typer.Option(file_okay=False, help="A new folder, for config.json and model.safetensors.")],
) -> None:
    """Write a trained mamba2 as Mamba2LM.from_pretrained reads it."""
    with refuse_errors():
        from .checkpoints import Damaged
        from .export import export
    with refuse_errors("", Damaged):
        step = export(run, require_writable(to, "--to"), console := make_console())
    console.print(f"step {step} of {run} is in {to}: ssd.modules.Mamba2LM.from_pretrained({str(to)!r})", markup=False)


@app.command()
def sweep(
    workload: flags.Workloads = "mamba2",
    variant: Annotated[str, typer.Option(help=f"To put inside, of {VARIANT_LIST}.")] = "mamba_ssm,persistent,fused,baseline",
    steps: Annotated[int, typer.Option(help="Steps of each training that the losses are taken from.")] = 200,
    dtype: flags.Autocast = "bf16", data: flags.Data = "synthetic", documents: flags.Documents = True,
    batch: flags.Batch = None, optimizer: flags.Optimizer = None, seed: flags.Seed = 0,
    repeats: flags.Repeats = 20, warmup: flags.Warmup = 3,
    each_option: Annotated[bool, typer.Option("--each-option", help="Also time each variant without each option.")] = False,
    each_step_option: Annotated[bool, typer.Option(
        "--each-step-option", help="Also time each variant's step with capture, torch.compile, kept activations and the "
        "optimizer's kernel changed, one at a time.")] = False,
    folder: Annotated[Path, typer.Option(file_okay=False, help="Of the training runs' folders.")] = Path("runs"),
    again: Annotated[bool, typer.Option("--again", help="Also run what has its row.")] = False,
    trains: Annotated[bool, typer.Option("--train/--no-train", help="Also train with each, for its loss.")] = True,
    counters: Annotated[bool, typer.Option(help="Also count bytes of a step's SSM kernels with ncu.")] = False,
    buckets: flags.Buckets = None, compile: flags.Compile = False, graph: flags.Graph = None,
    wide: flags.Wide = False, out: flags.Out = RESULTS,
) -> None:
    """Put variant after variant inside workloads: step times, side by side, and losses.

    What has its row is not run again.
    """
    variants, console = split_names("--variant", variant, VARIANTS), make_console()
    with refuse_errors():
        runs = [make_run(name, preset, mixer=mixer, data=data, documents=documents, steps=steps, batch=batch,
                         optimizer=optimizer, dtype=dtype, seed=seed, save_every=0, buckets=buckets, compile=compile)
                for name, preset, mixer in map(parse_workload, workload.split(","))]
    require_gpu("sweep", "make train trains on a CPU, too")
    from . import sweep, table

    try:
        plan = sweep.Plan(tuple(runs), tuple(variants), each_option, repeats, warmup, folder, out, again, trains, counters,
                          graph, each_step_option)
        with refuse_errors():
            failed = sweep.run(plan, console)
    except sweep.Interrupted as reason:
        console.print(f"{reason.number.name}: what was in progress is saved; the same command goes on", style="yellow")
        raise typer.Exit(128 + reason.number) from None
    found = [row for row in sweep.read_latest(out) if row["workload"] in {run.workload for run in runs}]
    table.show(console, found, "medians of a training step, speed-up over mamba_ssm", table.STEPS, wide)
    for line in failed:
        console.print(f"left out: {line}", style="yellow", markup=False)
    raise typer.Exit(1 if failed else 0)


@app.command("table")
def render_table(
    bench: Annotated[str, typer.Option(help=f"Rows of one of {', '.join(_TABLES)}; ssd compares variants.")] = "ssd",
    kind: Annotated[str, typer.Option("--format", help=f"One of {', '.join(_FORMATS)}.")] = "markdown",
    variant: Annotated[str, typer.Option(help="Only these variants.")] = "",
    shape: Annotated[str, typer.Option(help="Only these shapes.")] = "",
    mode: Annotated[str, typer.Option(help="Only these modes.")] = "",
    all_chunks: Annotated[bool, typer.Option(help="Every chunk size instead of the fastest.")] = False,
    kernels: Annotated[bool, typer.Option("--kernels", help="Of counters: a line for each kernel too.")] = False,
    out: flags.Rows = RESULTS,
) -> None:
    """Print the latest row of each variant, shape and mode, with every column."""
    check_name("--format", kind, _FORMATS), check_name("--bench", bench, _TABLES)
    wanted = {"variant": split_names("--variant", variant, VARIANTS) if variant else None,
              "mode": split_names("--mode", mode, MODES) if mode else None,
              "shape": [s.name for s in split_shapes(shape)] if shape else None}
    if kernels and bench != "counters":
        refuse(f"--kernels: got --bench {bench}, expected --bench counters")
    has_gpu()
    from . import table

    module, columns = _TABLES[bench]
    more = {"ssd": {"all_chunks": all_chunks}, "counters": {"by_kernel": kernels}}.get(bench, {})
    read = partial(import_module(f"{__package__}.{module}").read_latest, out, **more)
    rows = [row for row in read_rows(read, out)
            if all(names is None or row.get(key) in names for key, names in wanted.items())]
    typer.echo(table.render(rows, kind, getattr(table, "COUNTERS_BY_KERNEL" if kernels else columns)), nl=False)


@app.command()
def readme(
    check: Annotated[bool, typer.Option(help="Change nothing; exit 1 if a page or a figure is out of date.")] = False,
    out: flags.Rows = RESULTS,
) -> None:
    """Write the tables and figures of README and docs from committed rows."""
    has_gpu()
    from . import readme

    shown = read_rows(lambda: readme.Shown.read(out), out)
    if not shown.choices:
        refuse(f"--out: got {out}, which has no row of make bench on a GPU, expected a folder of measured rows")
    with refuse_errors("readme: "):
        current = readme.write(shown, check=check)
    typer.echo("README is up to date" if current else "README is out of date" if check else "README written")
    raise typer.Exit(1 if check and not current else 0)


@app.command()
def tune(
    shape: Annotated[str, typer.Option(help="Shapes to tune for; a later one replaces what they share.")] = "8b-b4",
    dtype: flags.Dtype = "bf16", chunk_size: flags.ChunkSizes = "auto",
    repeats: Annotated[int, typer.Option(min=1, help="Timed calls of each config.")] = 10,
) -> None:
    """Freeze each kernel's fastest config on this GPU in ssd/configs/<gpu>.json, and refit fused/configs/<gpu>.json."""
    shapes, sizes = split_shapes(shape), split_chunk_sizes(chunk_size)
    require_gpu("tune")
    from . import fit_times, tune

    console = make_console()
    tune.run(shapes, dtype, sizes, repeats, console)
    fit_times.run(console)


@app.command()
def choose(out: flags.Rows = RESULTS) -> None:
    """Write what variant "auto" chooses by, ssd/configs/variants/<gpu>.json, from committed rows."""
    from . import choose, record

    tables = choose.make_tables(read_rows(lambda: record.read_gpus(out), out))
    for path in choose.write_tables(tables):
        typer.echo(f"{path} written: {len(tables[path.stem].calls)} measured calls")
    if not tables:
        typer.echo(f"nothing to choose by: no GPU has {choose.FEWEST} measured calls of {', '.join(choose.list_candidates())}")


@app.command()
def sanitize(
    variant: Annotated[str, typer.Option(help="Of persistent, fused, baseline, block and control; all, but control on Hopper "
                                              "alone.")] = "",
    tool: Annotated[str, typer.Option(help=f"Tools of compute-sanitizer, of {', '.join(_TOOLS)}.")] = ",".join(_TOOLS),
    out: flags.Out = RESULTS,
) -> None:
    """Run every kernel of the variants under compute-sanitizer, and append a row for each tool.

    Exits with 1 if a tool finds anything but what Triton's own start of warp-specialised roles causes.
    """
    tools = split_names("--tool", tool, _TOOLS)
    has_gpu()  # before Triton is imported
    from . import sanitize

    variants = split_names("--variant", variant, sanitize.VARIANTS) if variant else []
    require_gpu("sanitize")
    with refuse_errors("sanitize: "):
        clean = sanitize.run(variants or sanitize.list_variants(), tools, out, make_console())
    raise typer.Exit(0 if clean else 1)


@app.command(hidden=True)
def once(place: str, arguments: Annotated[str, typer.Argument()] = "{}") -> None:
    """Calls a function of this package, `module:function`, with arguments as JSON: what runs under ncu or compute-sanitizer."""
    has_gpu()
    module, _, function = place.partition(":")
    getattr(import_module(f"{__package__}.{module}"), function)(**json.loads(arguments))


for command in (block, patches, decode, context, documents, characterisation.compare, characterisation.report,
                characterisation.characterize, characterisation.scaling, fuzz, prune, prune_speed, regress):
    app.command()(command)

if __name__ == "__main__":
    app()
