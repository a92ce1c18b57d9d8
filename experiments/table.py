"""Rows as a table: on the terminal, in Markdown, CSV or LaTeX."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from . import record
from .kernel_names import present_name
from .shapes import MODES, SHAPES

FORMATS = ("markdown", "csv", "latex")
_RIGHT = "right"


def write_number(digits: int, scale: float = 1, missing: str = "") -> Callable:
    return lambda value: missing if value is None else f"{scale * value:.{digits}f}"


def write_microseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def write_text(value) -> str:
    return "" if value is None else str(value)


def make_columns(*headers: str) -> dict:
    """Columns whose cells are texts under the header's own name."""
    return {header: (header, write_text) for header in headers}


def _shorten_kernel(name: str) -> str:
    """As it is called now, without the return type and the arguments of a C++ template."""
    return present_name(name).removeprefix("void ").partition("<")[0]


def _write_scientific(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


# header: (key of the row, how to write its value)
COLUMNS = {
    "shape": ("shape", write_text),
    "mode": ("mode", write_text),
    "variant": ("variant", write_text),
    "chunk": ("chunk_size", write_text),
    "us": ("p50_us", write_microseconds),
    "graph us": ("graph_p50_us", write_microseconds),
    "GB/s": ("effective_gbps", write_number(0)),
    "of copy %": ("sol", write_number(1, 100)),
    "TFLOP/s": ("tflops", write_number(0)),
    "launches": ("launches", write_text),
    "MiB": ("peak_mib", write_number(0)),
    "saved MiB": ("saved_mib", write_number(0)),
    "error": ("err_rms", _write_scientific),
    "options": ("options", record.changed_options),
    "against": ("against", write_text),
    "speed-up": ("speedup", write_number(2)),
    "graph speed-up": ("graph_speedup", write_number(2)),
}
# of the bench `ablate`; relative: to the time with every option on
ABLATION = {
    "shape": ("shape", write_text),
    "mode": ("mode", write_text),
    "variant": ("variant", write_text),
    "chunk": ("chunk_size", write_text),
    "step": ("step", write_text),
    "option": ("changed", write_text),
    "us": ("p50_us", write_microseconds),
    "graph us": ("graph_p50_us", write_microseconds),
    "relative": ("relative", write_number(2)),
    "error": ("err_rms", _write_scientific),
}
# of the bench `block`; apart: how far ours is from upstream's
_NOT_OF_BLOCKS = ("chunk", "TFLOP/s", "saved MiB", "error", "options")
BLOCK = {"part": ("part", write_text), **{header: COLUMNS[header] for header in COLUMNS if header not in _NOT_OF_BLOCKS},
         "apart": ("apart", _write_scientific)}
# of the bench `step`; share: of the state-space model in the step; U, W: of DRAM, see `sweep.read_latest`; loss: of a training
# of its own
STEPS = {
    "workload": ("workload", write_text),
    "preset": ("preset", write_text),
    "mixer": ("mixer", write_text),
    "batch": ("batch", write_text),
    "tokens": ("seqlen", write_text),
    "dtype": ("dtype", write_text),
    "variant": ("variant", write_text),
    "options": COLUMNS["options"],
    "step ms": ("p50_us", write_number(1, 1e-3)),
    "a second": ("units_per_s", write_number(0)),
    "unit": ("unit", write_text),
    "SSM ms": ("ssm_us", write_number(1, 1e-3)),
    "SSM %": ("share", write_number(1, 100)),
    "SSM GB/s": ("effective_gbps", write_number(0)),
    "U %": ("U", write_number(1)),
    "W %": ("W", write_number(1)),
    "G %": ("G", write_number(1)),
    "MiB": COLUMNS["MiB"],
    "loss": ("loss", write_number(3)),
    "speed-up": COLUMNS["speed-up"],
}
# of the bench `counters`, which rows measured before a counter was read lack; DRAM utilisation: U is the mean over kernels,
# W the mean weighted with time
_counter = partial(write_number, missing="-")
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
_KERNEL = {"kernel": ("kernel", _shorten_kernel)}
COUNTERS = _CALL | _TRAFFIC | {"U %": ("mean_dram_pct", _counter(1)), "W %": ("dram_pct", _counter(1))} | _WORK
COUNTERS_BY_KERNEL = _CALL | _KERNEL | {"time %": ("time_pct", _counter(1))} | COUNTERS
KERNELS = _KERNEL | _TRAFFIC | {"DRAM %": ("dram_pct", _counter(1))} | _WORK
# What fits a terminal of 100 columns, by the table; the others are in `--wide`, in `table` and in the rows' files.
_SHARED = {"GPU us": ("graph_p50_us", write_microseconds), "eager us": ("p50_us", write_microseconds),
           "copy %": COLUMNS["of copy %"],
           "relative": ABLATION["relative"], "speed-up": ("graph_speedup", write_number(2))}


def _choose(columns: dict, *headers: str) -> dict:
    return {header: _SHARED[header] if header in _SHARED else columns[header] for header in headers}


NARROW = {
    "COLUMNS": _choose(COLUMNS, "shape", "mode", "variant", "chunk", "GPU us", "eager us", "copy %", "MiB", "error",
                       "speed-up"),
    "ABLATION": _choose(ABLATION, "shape", "mode", "variant", "step", "option", "GPU us", "relative", "error"),
    "BLOCK": _choose(BLOCK, "part", "shape", "mode", "variant", "GPU us", "eager us", "copy %", "speed-up"),
    "STEPS": {header: STEPS[header] for header in (
        "workload", "preset", "mixer", "batch", "variant", "options", "step ms", "SSM ms", "MiB", "loss", "speed-up")},
    "COUNTERS": _choose(COUNTERS, "shape", "mode", "variant", "launches", "DRAM MB", "U %", "W %", "occupancy %", "tensor %"),
    "KERNELS": _choose(KERNELS, "kernel", "DRAM MB", "DRAM %", "blocks", "registers", "occupancy %", "tensor %"),
}
_COMPARED = ("gpu", "shape", "mode", "dtype")  # what rows that compare share
_LEFT_ALIGNED = ("stage", "worst in", "bound by", "tool", "shape", "mode", "variant", "options", "against", "step", "option",
                 "kernel", "part", "workload", "preset", "mixer", "dtype", "unit", "bench", "what", "verdict")


def identify(row: dict) -> tuple:
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


def keep_best_chunk(rows: list[dict]) -> list[dict]:
    """Of rows that differ in nothing but the chunk size, the fastest: by the kernels' time, without that of launching them,
    where a graph gave it.
    """

    def time(row: dict) -> tuple[bool, float]:
        return row["graph_p50_us"] is None, row["graph_p50_us"] or row["p50_us"]

    best = {}
    for row in rows:
        key = identify(row)[:-1]
        if key not in best or time(row) < time(best[key]):
            best[key] = row
    return list(best.values())


def keep_last_commit(rows: list[dict]) -> list[dict]:
    """Of rows that differ in nothing but the chunk size, those of the commit measured last: times of two do not compare."""
    measured = {identify(row)[:-1]: row["git_sha"] for row in rows}
    return [row for row in rows if row["git_sha"] == measured[identify(row)[:-1]]]


def read_latest(out: Path | list[dict] = record.RESULTS, all_chunks: bool = False, compared: bool = False,
                **where) -> list[dict]:
    """The bench's latest rows; compared: those taken beside a rival, where there are any."""
    rows = record.read(out, bench="ssd", **where)
    if compared:
        beside = {identify(row)[:-1] for row in rows if row.get("against")}
        rows = [row for row in rows if row.get("against") or identify(row)[:-1] not in beside]
    rows = record.latest(keep_last_commit(rows), identify)
    return sort_rows(rows if all_chunks else keep_best_chunk(rows))


def compare_with_least(rows: list[dict], rivals: list[dict]) -> list[dict]:
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


def sort_rows(rows: list[dict]) -> list[dict]:
    """By GPU, shape, mode and variant: shapes as they are listed, variants as they first come, modes from fwd to fwd_bwd."""
    order = {"shape": _number_names(SHAPES), "mode": _number_names(MODES), "variant": {}}
    for row in rows:
        for key, seen in order.items():
            seen.setdefault(row[key], len(seen))
    return sorted(rows, key=lambda row: (row["gpu"], *(seen[row[key]] for key, seen in order.items())))


def _number_names(names: Iterable[str]) -> dict[str, int]:
    return {name: n for n, name in enumerate(names)}


def show(console: Console, rows: list[dict], title: str, columns: dict = COLUMNS, wide: bool = False) -> None:
    """Prints a table of at most 100 columns for each GPU and dtype of the rows, with both and the commits in its title.

    Args:
        columns: one of the tables above. Its most important columns are shown, but none that is empty in every row.
        wide: show every column, on a console as wide as they need.
    """
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault((row.get("gpu") or "no GPU", row.get("dtype")), []).append(row)
    for (gpu, dtype), group in groups.items():
        rivals = dict.fromkeys(row["against"] for row in group if row.get("against"))
        over = f"speed-up over {', '.join(rivals)}" if rivals else ""
        table = make_table(group, ", ".join(filter(None, (title, gpu, dtype, _describe_commits(group), over))), columns, wide)
        console.width = max(console.width, Console(width=1000).measure(table).maximum)  # rather wide than cut
        console.print(table)


def make_table(rows: list[dict], title: str, columns: dict = COLUMNS, wide: bool = False) -> Table:
    """For rich; no cell is cut. As in `show`."""
    chosen = columns if wide else _choose_narrow(columns)
    cells = {header: [write(row.get(key)) for row in rows] for header, (key, write) in chosen.items()}
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left")
    for header in (header for header, values in cells.items() if wide or any(values) or not rows):
        table.add_column(header, justify="left" if header in _LEFT_ALIGNED else _RIGHT, no_wrap=header != "options")
    shown = [cells[column.header] for column in table.columns]
    for row, values in zip(rows, zip(*shown, strict=True), strict=False):
        table.add_row(*values, style="dim" if columns is COLUMNS and not row.get("against") else None)
    return table


def _choose_narrow(columns: dict) -> dict:
    return next((narrow for name, narrow in NARROW.items() if globals()[name] is columns), columns)


def _describe_commits(rows: list[dict]) -> str:
    """`commit 0123456`; of several the first and the last, by time."""
    found = list(dict.fromkeys(row["git_sha"][:7] for row in sorted(rows, key=lambda row: row["time"]) if row.get("git_sha")))
    if len(found) < 2:
        return f"commit {found[0]}" if found else ""
    return f"commits {found[0]} to {found[-1]}"


def render(rows: list[dict], kind: str, columns: dict = COLUMNS) -> str:
    """As text of one of FORMATS. CSV has every key as it was recorded, the others the columns given."""
    import pandas as pd  # half a second that --help need not wait

    if kind == "csv":
        return pd.DataFrame(rows).to_csv(index=False)
    cells = [[write(row.get(key)) for key, write in columns.values()] for row in rows]
    if kind == "latex":
        frame = pd.DataFrame(cells, columns=list(columns))
        return frame.style.hide(axis="index").format(escape="latex").format_index(escape="latex", axis=1).to_latex(hrules=True)
    return render_markdown(list(columns), cells, [header for header in columns if header in _LEFT_ALIGNED])


def render_markdown(header: Sequence[str], rows: Iterable[Sequence[object]], names: Iterable[str] = ()) -> str:
    """A table in Markdown; the columns of `names` are aligned to the left, the others, numbers, to the right."""
    rules = ["---" if name in {*names} else "---:" for name in header]
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in (header, rules, *rows))
