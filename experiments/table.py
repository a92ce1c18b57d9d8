"""Rows as a table: on the terminal, in Markdown, CSV or LaTeX."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial

import pandas as pd
from rich.table import Table

from . import record
from .shapes import MODES, SHAPES

FORMATS = ("markdown", "csv", "latex")
_RIGHT = "right"


def _number(digits: int, scale: float = 1, missing: str = "") -> Callable:
    return lambda value: missing if value is None else f"{scale * value:.{digits}f}"


def microseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _text(value) -> str:
    return "" if value is None else str(value)


def _kernel(name: str) -> str:
    """Without the return type and the arguments of a C++ template."""
    return name.removeprefix("void ").partition("<")[0]


def _scientific(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


# header: (key of the row, how to write its value)
COLUMNS = {
    "shape": ("shape", _text),
    "mode": ("mode", _text),
    "variant": ("variant", _text),
    "chunk": ("chunk_size", _text),
    "us": ("p50_us", microseconds),
    "graph us": ("graph_p50_us", microseconds),
    "GB/s": ("effective_gbps", _number(0)),
    "of copy %": ("sol", _number(1, 100)),
    "TFLOP/s": ("tflops", _number(0)),
    "launches": ("launches", _text),
    "MiB": ("peak_mib", _number(0)),
    "saved MiB": ("saved_mib", _number(0)),
    "error": ("err_rms", _scientific),
    "options": ("options", record.changed_options),
    "against": ("against", _text),
    "speed-up": ("speedup", _number(2)),
    "graph speed-up": ("graph_speedup", _number(2)),
}
# of the bench `ablate`; relative: to the time with every option on
ABLATION = {
    "shape": ("shape", _text),
    "mode": ("mode", _text),
    "variant": ("variant", _text),
    "chunk": ("chunk_size", _text),
    "step": ("step", _text),
    "option": ("changed", _text),
    "us": ("p50_us", microseconds),
    "graph us": ("graph_p50_us", microseconds),
    "relative": ("relative", _number(2)),
    "error": ("err_rms", _scientific),
}
# of the bench `block`; apart: how far ours is from upstream's
_NOT_OF_BLOCKS = ("chunk", "TFLOP/s", "saved MiB", "error", "options")
BLOCK = {"part": ("part", _text), **{header: COLUMNS[header] for header in COLUMNS if header not in _NOT_OF_BLOCKS},
         "apart": ("apart", _scientific)}
# of the bench `step`; share: of the state-space model in the step; U, W: of DRAM, see `sweep.committed`; loss: of a training
# of its own
STEPS = {
    "workload": ("workload", _text),
    "preset": ("preset", _text),
    "mixer": ("mixer", _text),
    "batch": ("batch", _text),
    "tokens": ("seqlen", _text),
    "dtype": ("dtype", _text),
    "variant": ("variant", _text),
    "options": COLUMNS["options"],
    "step ms": ("p50_us", _number(1, 1e-3)),
    "a second": ("units_per_s", _number(0)),
    "unit": ("unit", _text),
    "SSM ms": ("ssm_us", _number(1, 1e-3)),
    "SSM %": ("share", _number(1, 100)),
    "SSM GB/s": ("effective_gbps", _number(0)),
    "U %": ("U", _number(1)),
    "W %": ("W", _number(1)),
    "G %": ("G", _number(1)),
    "MiB": COLUMNS["MiB"],
    "loss": ("loss", _number(3)),
    "speed-up": COLUMNS["speed-up"],
}
# of the bench `counters`, which rows measured before a counter was read lack; DRAM utilisation: U is the mean over kernels,
# W the mean weighted with time
_counter = partial(_number, missing="-")
_CALL = {header: COLUMNS[header] for header in ("shape", "mode", "variant", "chunk", "options")}
_TRAFFIC = {"launches": ("launches", _counter(0)), "DRAM MB": ("dram_bytes", _counter(1, 1e-6))}
_WORK = {
    "block cycles": ("block_cycles", _counter(0)),
    "blocks": ("blocks", _counter(0)),
    "registers": ("registers", _counter(0)),
    "occupancy %": ("occupancy_pct", _counter(1)),
    "tensor %": ("tensor_pct", _counter(1)),
    "issue %": ("issue_pct", _counter(1)),
    "shared %": ("shared_pct", _counter(1)),
    "L2 hit %": ("l2_hit_pct", _counter(1)),
}
_KERNEL = {"kernel": ("kernel", _kernel)}
COUNTERS = _CALL | _TRAFFIC | {"U %": ("mean_dram_pct", _counter(1)), "W %": ("dram_pct", _counter(1))} | _WORK
COUNTERS_BY_KERNEL = _CALL | _KERNEL | {"time %": ("time_pct", _counter(1))} | COUNTERS
KERNELS = _KERNEL | _TRAFFIC | {"DRAM %": ("dram_pct", _counter(1))} | _WORK
_COMPARED = ("gpu", "shape", "mode", "dtype")  # what rows that compare share
_LEFT_ALIGNED = ("shape", "mode", "variant", "options", "against", "step", "option", "kernel", "part", "workload",
                 "preset", "mixer", "dtype", "unit")


def subject(row: dict) -> tuple:
    """What a row measures: rows that share this are repetitions, of which the last counts."""
    return (
        row["gpu"],
        row["bench"],
        row["variant"],
        str(record.options(row)),
        row["mode"],
        row["shape"],
        row["dtype"],
        row["chunk_size"],
    )


def best_chunk(rows: list[dict]) -> list[dict]:
    """Of rows that differ in nothing but the chunk size, the fastest: by the kernels' time, without that of launching them,
    where a graph gave it.
    """

    def time(row: dict) -> tuple[bool, float]:
        return row["graph_p50_us"] is None, row["graph_p50_us"] or row["p50_us"]

    best = {}
    for row in rows:
        key = subject(row)[:-1]
        if key not in best or time(row) < time(best[key]):
            best[key] = row
    return list(best.values())


def last_commit(rows: list[dict]) -> list[dict]:
    """Of rows that differ in nothing but the chunk size, those of the commit measured last: times of two do not compare."""
    measured = {subject(row)[:-1]: row["git_sha"] for row in rows}
    return [row for row in rows if row["git_sha"] == measured[subject(row)[:-1]]]


def committed(out=record.RESULTS, all_chunks: bool = False, compared: bool = False, **where) -> list[dict]:
    """The bench's latest rows; compared: those taken beside a rival, where there are any."""
    rows = record.read(out, bench="ssd", **where)
    if compared:
        beside = {subject(row)[:-1] for row in rows if row.get("against")}
        rows = [row for row in rows if row.get("against") or subject(row)[:-1] not in beside]
    rows = record.latest(last_commit(rows), subject)
    return in_order(rows if all_chunks else best_chunk(rows))


def against_the_least(rows: list[dict], rivals: list[dict]) -> list[dict]:
    """The rows, compared in GPU time with their rival's least: of their own run, or of its last rows where those say less.
    Eager times are the host's as well, and compare within a run alone.
    """
    least: dict[tuple, float] = {}
    for row in rivals:
        if row["graph_p50_us"]:
            of = *(row[key] for key in _COMPARED), row["variant"]
            least[of] = min(row["graph_p50_us"], least.get(of, math.inf))

    def compared(row: dict) -> dict:
        us = least.get((*(row[key] for key in _COMPARED), row.get("against")), math.inf)
        if not row.get("graph_speedup") or us >= row["against_graph_p50_us"]:
            return row
        return row | {"against_graph_p50_us": us, "graph_speedup": us / row["graph_p50_us"]}

    return [compared(row) for row in rows]


def in_order(rows: list[dict]) -> list[dict]:
    """By GPU, shape, mode and variant: shapes as they are listed, variants as they first come, modes from fwd to fwd_bwd."""
    order = {"shape": _numbered(SHAPES), "mode": _numbered(MODES), "variant": {}}
    for row in rows:
        for key, seen in order.items():
            seen.setdefault(row[key], len(seen))
    return sorted(rows, key=lambda row: (row["gpu"], *(seen[row[key]] for key, seen in order.items())))


def _numbered(names: Iterable[str]) -> dict[str, int]:
    return {name: n for n, name in enumerate(names)}


def terminal(rows: list[dict], title: str, columns: dict = COLUMNS) -> Table:
    """For rich."""
    table = Table(title=title)
    for header in columns:
        names = header in _LEFT_ALIGNED  # stay whole in a narrow terminal; numbers fold
        table.add_column(header, justify="left" if names else _RIGHT, overflow="fold", no_wrap=names)
    for row in rows:
        table.add_row(*_cells(row, columns), style="dim" if columns is COLUMNS and not row.get("against") else None)
    return table


def render(rows: list[dict], kind: str, columns: dict = COLUMNS) -> str:
    """As text of one of FORMATS. CSV has every key as it was recorded, the others the columns given."""
    if kind == "csv":
        return pd.DataFrame(rows).to_csv(index=False)
    frame = pd.DataFrame([_cells(row, columns) for row in rows], columns=list(columns))
    if kind == "latex":
        return frame.style.hide(axis="index").format(escape="latex").format_index(escape="latex", axis=1).to_latex(hrules=True)
    align = ["left" if header in _LEFT_ALIGNED else _RIGHT for header in columns]
    return frame.to_markdown(index=False, disable_numparse=True, colalign=align) + "\n"


def _cells(row: dict, columns: dict) -> list[str]:
    return [write(row.get(key)) for key, write in columns.values()]
