"""The ablation: what each option of a variant is worth, alone and as they are added up."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from fused import hopper
from ssd import Options, get_variant

from . import interpret, record, table
from .bench import Candidate, list_settings, make_row, measure
from .shapes import Shape
from .terminal import track


@dataclass(frozen=True)
class Step:
    """One set of options.

    Attributes:
        step: "all" (every option on), "without" (all but `changed`), "none" (every option off), or "added" (`changed` and
            those before it on).
        changed: the option that sets it apart; None for "all" and "none".
    """

    step: str
    changed: str | None
    options: Options


def list_steps(names: tuple[str, ...]) -> list[Step]:
    """The sets of options to measure for a variant with options of these names, in their order."""
    every = replace(Options(), **dict.fromkeys(names, True))
    plain = {"gluon": False} if "gluon" in names else {}

    def without(name: str) -> Options:
        """An option that the Gluon kernels need is taken from the plain kernels, and compared with all options of those."""
        return replace(every, **({} if name in hopper.MAY_BE_OFF else plain), **{name: False})

    bare = replace(Options(), **dict.fromkeys(names, False))
    added = (replace(bare, **dict.fromkeys(names[: n + 1], True)) for n in range(len(names)))
    return [
        Step("all", None, every),
        *(Step("without", name, without(name)) for name in names),
        Step("none", None, bare),
        *(Step("added", name, options) for name, options in zip(names, added, strict=True)),
    ]


def run(variants: Sequence[str], shapes: Sequence[Shape], modes: Sequence[str], dtype: str, chunk_size: int, out: Path,
        console: Console, repeats: int = 50, warmup: int = 10) -> list[dict]:
    """Measures every set of options of the variants and returns the rows, each appended to its file as soon as it is known.

    All variants and options of one shape and mode run side by side; options that several steps have in common, once.
    """
    rows = []
    wanted = [(step, Candidate(name, chunk_size, step.options)) for name, step in _list_every_step(variants)]
    candidates = list(dict.fromkeys(candidate for _, candidate in wanted))
    for setting, mode, ceiling in list_settings(shapes, modes, dtype, console):
        measured = measure(setting, mode, candidates, repeats, warmup, console)
        for step, candidate in wanted:
            if candidate in measured:
                values = {"step": step.step, "changed": step.changed, **measured[candidate]}
                rows.append(make_row("ablate", setting, mode, candidate, values, ceiling))
                record.append(rows[-1], out)
    return rows


def check(variants: tuple[str, ...], modes: tuple[str, ...], console: Console) -> bool:
    """Whether every set of options agrees with fp64 in what the modes compute, in Triton's interpreter. Nothing is timed."""
    console.print("No CUDA GPU: nothing is timed; each set of options runs in Triton's interpreter.", style="bold")
    rows = []
    for name, step in track(_list_every_step(variants), console, _describe_step):
        rows += [row | {"step": step.step, "option": step.changed} for row in interpret.judge(name, step.options, modes)]
    columns = table.make_columns("variant", "step", "option", *list(interpret.ERRORS)[1:])
    console.print(table.make_table(rows, "errors against fp64, relative", columns))
    return all(row["agrees"] for row in rows)


def read_latest(out: Path = record.RESULTS, **where) -> list[dict]:
    """The latest rows, with `relative`."""
    rows = table.keep_last_commit(record.read(out, bench="ablate", **where))
    return add_relative(record.latest(rows, lambda row: (*_identify_setting(row), row["step"], row["changed"])))


def add_relative(rows: list[dict]) -> list[dict]:
    """The rows with `relative`: their time over that with every option on, in CUDA graphs where both have one.

    A row without an option that the Gluon kernels cannot be without is one of the plain kernels: over all their options, and
    `plain` says so.
    """
    whole = {_identify_setting(row): row for row in rows if row["step"] == "all"}
    plain = {_identify_setting(row): row for row in rows if (row["step"], row["changed"]) == ("without", "gluon")}

    def compare(row: dict) -> dict:
        beside_plain = row["step"] == "without" and row["changed"] not in hopper.MAY_BE_OFF
        base = plain.get(_identify_setting(row)) if beside_plain else None
        return row | {"relative": _compute_relative(row, base or whole.get(_identify_setting(row))), "plain": base is not None}

    return [compare(row) for row in rows]


def _list_every_step(variants: Sequence[str]) -> Iterator[tuple[str, Step]]:
    for name in variants:
        for step in list_steps(get_variant(name).options):
            yield name, step


def _describe_step(of: tuple[str, Step]) -> str:
    """`fused: without exp2`."""
    variant, step = of
    return f"{variant}: {' '.join(filter(None, (step.step, step.changed)))}"


def _identify_setting(row: dict) -> tuple:
    return tuple(row[key] for key in ("gpu", "variant", "mode", "shape", "dtype", "chunk_size"))


def _compute_relative(row: dict, whole: dict | None) -> float | None:
    key = "graph_p50_us" if whole and row["graph_p50_us"] and whole["graph_p50_us"] else "p50_us"
    return row[key] / whole[key] if whole else None
