"""Rows as a table: on the terminal, in Markdown, CSV or LaTeX."""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from . import record
from .kernel_names import present_name
from .shapes import MODES, SHAPES
from .terminal import make_empty_table

FORMATS = ("markdown", "csv", "latex")


def write_number(digits: int, scale: float = 1, missing: str = "") -> Callable:
    return lambda value: missing if value is None else f"{scale * value:.{digits}f}"


def write_microseconds(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def write_text(value) -> str:
    return "" if value is None else str(value)


def write_scientific(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}"


def make_columns(*headers: str) -> dict:
    """Columns whose cells are texts under the header's own name."""
    return {header: (header, write_text) for header in headers}


def shorten_kernel(name: str) -> str:
    """As it is called now, without the return type and the arguments of a C++ template."""
    return present_name(name).removeprefix("void ").partition("<")[0]


# Every column of a bench's rows. header: (key of the row, how to write its value). relative: to the time with every option on;
# apart: how far ours is from upstream's; U, W, G: of DRAM, see `sweep.read_latest`; loss: of a training of its own
_COLUMNS = {
    **make_columns("shape", "mode", "variant", "part", "step", "launches", "against", "workload", "preset", "mixer", "batch",
                   "dtype", "unit", "graph", "compile", "states", "note", "kind", "ratio", "score", "finetune", "bridged",
                   "parameters"),
    "ms": ("p50_us", write_number(3, 1e-3)), "same %": ("same_tokens", write_number(1, 100)), "prompt": ("seqlen", write_text),
    "chunk": ("chunk_size", write_text), "option": ("changed", write_text), "tokens": ("seqlen", write_text),
    "options": ("options", record.describe_options),
    "us": ("p50_us", write_microseconds), "graph us": ("graph_p50_us", write_microseconds),
    "eager us": ("p50_us", write_microseconds), "GPU us": ("graph_p50_us", write_microseconds),
    "step ms": ("p50_us", write_number(1, 1e-3)), "SSM ms": ("ssm_us", write_number(1, 1e-3)),
    "host ms": ("host_us", write_number(1, 1e-3)), "no SSM ms": ("without_ssm_us", write_number(1, 1e-3)),
    **{f"{name} %": (f"{name.lower()}_pct", write_number(1)) for name in ("idle", "fill", "MFU")},
    "a second": ("units_per_s", write_number(0)), "TFLOP/s": ("tflops", write_number(0)),
    "GB/s": ("effective_gbps", write_number(0)), "SSM GB/s": ("effective_gbps", write_number(0)),
    "of copy %": ("sol", write_number(1, 100)), "copy %": ("of_copy", write_number(1, 100)),
    "SSM %": ("share", write_number(1, 100)), **{f"{name} %": (name, write_number(1)) for name in "UWG"},
    "MiB": ("peak_mib", write_number(0)), "saved MiB": ("saved_mib", write_number(0)),
    "weights MiB": ("weights_mib", write_number(0)),
    "relative": ("relative", write_number(2)), "speed-up": ("speedup", write_number(2)),
    "graph speed-up": ("graph_speedup", write_number(2)), "loss": ("loss", write_number(3)),
    "whole": ("loss_whole", write_number(3)), "pruned": ("loss_pruned", write_number(3)),
    "after bridge": ("loss_bridged", write_number(3)), "fine-tuned": ("loss", write_number(3)),
    "error": ("err_rms", write_scientific), "apart": ("apart", write_scientific)}
# Of what ncu counted, which rows measured before a counter was read lack. U is the mean over kernels, W weighted with time.
_COUNTED = {header: (key, write_number(digits, scale, missing="-")) for header, key, digits, scale in (
    ("launches", "launches", 0, 1), ("DRAM MB", "dram_bytes", 1, 1e-6), ("U %", "mean_dram_pct", 1, 1),
    ("W %", "dram_pct", 1, 1), ("DRAM %", "dram_pct", 1, 1), ("time %", "time_pct", 1, 1),
    ("block cycles", "block_cycles", 0, 1), ("blocks", "blocks", 0, 1), ("registers", "registers", 0, 1),
    ("occupancy %", "occupancy_pct", 1, 1), ("tensor %", "tensor_pct", 1, 1), ("issue %", "issue_pct", 1, 1),
    ("shared %", "shared_pct", 1, 1), ("L2 hit %", "l2_hit_pct", 1, 1))} | {"kernel": ("kernel", shorten_kernel)}


def _pick(headers: str, columns: dict = _COLUMNS) -> dict:
    """Those columns, a comma between."""
    return {header: columns[header] for header in headers.split(", ")}


_WORK = "block cycles, blocks, registers, occupancy %, tensor %, issue %, shared %, L2 hit %"
_CALL = "shape, mode, variant, chunk, options"
_TIMES = "us, graph us, GB/s, of copy %"
COLUMNS = _pick(f"shape, mode, variant, chunk, {_TIMES}, TFLOP/s, launches, MiB, saved MiB, error, options, against, speed-up, "
                "graph speed-up")
ABLATION = _pick("shape, mode, variant, chunk, step, option, us, graph us, relative, error")
BLOCK = _pick(f"part, shape, mode, variant, {_TIMES}, launches, MiB, against, speed-up, graph speed-up, apart")
DECODE = _pick("preset, batch, mode, prompt, variant, graph, states, ms, a second, same %, against, speed-up, note")
STEPS = _pick("workload, preset, mixer, batch, tokens, dtype, variant, options, step ms, a second, unit, SSM ms, SSM %, "
              "SSM GB/s, U %, W %, G %, graph, compile, no SSM ms, host ms, idle %, fill %, TFLOP/s, MFU %, MiB, loss, "
              "speed-up")
PRUNING = _pick("workload, preset, variant, kind, ratio, score, parameters, whole, pruned, after bridge, bridged, fine-tuned, "
                "finetune, step ms, MiB")
PRUNING_SPEED = _pick("part, preset, mode, variant, kind, ratio, batch, tokens, us, graph us, weights MiB, MiB, speed-up, "
                      "graph speed-up")
COUNTERS = _pick(f"{_CALL}, launches, DRAM MB, U %, W %, {_WORK}", _COLUMNS | _COUNTED)
COUNTERS_BY_KERNEL = _pick(f"{_CALL}, kernel, time %, launches, DRAM MB, U %, W %, {_WORK}", _COLUMNS | _COUNTED)
KERNELS = _pick(f"kernel, launches, DRAM MB, DRAM %, {_WORK}", _COUNTED)
# What fits a terminal of 100 columns, by the table; the others are in `--wide`, in `table` and in the rows' files.
_BY_GRAPH = _COLUMNS | {"speed-up": _COLUMNS["graph speed-up"]}
NARROW = {
    "COLUMNS": _pick("shape, mode, variant, chunk, GPU us, eager us, copy %, MiB, error, speed-up", _BY_GRAPH),
    "ABLATION": _pick("shape, mode, variant, step, option, GPU us, relative, error"),
    "BLOCK": _pick("part, shape, mode, variant, GPU us, eager us, copy %, speed-up", _BY_GRAPH),
    "DECODE": _pick("preset, batch, mode, prompt, variant, graph, states, ms, a second, same %, speed-up"),
    "STEPS": _pick("workload, preset, mixer, batch, variant, options, graph, compile, step ms, SSM ms, idle %, MFU %, loss, "
                   "speed-up"),
    "PRUNING": _pick("kind, ratio, score, parameters, whole, pruned, after bridge, fine-tuned, step ms, MiB"),
    "PRUNING_SPEED": _pick("part, mode, ratio, tokens, GPU us, eager us, weights MiB, MiB, speed-up, graph speed-up"),
    "COUNTERS": _pick("shape, mode, variant, launches, DRAM MB, U %, W %, occupancy %, tensor %", COUNTERS),
    "KERNELS": _pick("kernel, DRAM MB, DRAM %, blocks, registers, occupancy %, tensor %", KERNELS),
}
_COMPARED = ("gpu", "shape", "mode", "dtype")  # what rows that compare share
_LEFT_ALIGNED = ("stage", "worst in", "bound by", "tool", "shape", "mode", "variant", "options", "against", "step", "option",
                 "kernel", "part", "workload", "preset", "GPU", "mixer", "dtype", "unit", "bench", "what", "verdict", "note",
                 "kind", "score")


def identify(row: dict) -> tuple:
    """What a row measures, the chunk size last: rows that share this are repetitions, of which the last counts."""
    return *(row[key] for key in ("bench", "variant", *_COMPARED)), str(record.options(row)), row["chunk_size"]


def keep_best_chunk(rows: list[dict]) -> list[dict]:
    """Of rows that differ in nothing but the chunk size, the fastest: by the kernels' time, without that of launching them,
    where a graph gave it.
    """
    groups = record.group_by(rows, lambda row: identify(row)[:-1])
    return [min(group, key=lambda row: (row["graph_p50_us"] is None, record.get_us(row)))
            for group in groups.values()]


def keep_last_commit(rows: list[dict]) -> list[dict]:
    """Of rows that differ in nothing but the chunk size, those of the commit measured last: times of two do not compare."""
    measured = {identify(row)[:-1]: row["git_sha"] for row in rows}
    return [row for row in rows if row["git_sha"] == measured[identify(row)[:-1]]]


def read_latest(out: Path | list[dict] = record.RESULTS, all_chunks: bool = False, compared: bool = False,
                **where) -> list[dict]:
    """The bench's latest rows, those of a slow clock only where there are no others.

    compared: those taken beside a rival, where there are any.
    """
    rows = sorted(record.read(out, bench="ssd", **where), key=record.is_slow, reverse=True)
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

    def compare(row: dict) -> dict:
        us = least.get((*(row[key] for key in _COMPARED), row.get("against")), math.inf)
        if not row.get("graph_speedup") or us >= row["against_graph_p50_us"]:
            return row
        return row | {"against_graph_p50_us": us, "graph_speedup": us / row["graph_p50_us"]}

    return [compare(row) for row in rows]


def sort_rows(rows: list[dict]) -> list[dict]:
    """By GPU, shape, mode and variant: shapes as they are listed, variants as they first come, modes from fwd to fwd_bwd."""
    known = {"shape": SHAPES, "mode": MODES, "variant": ()}
    order = {key: list(dict.fromkeys([*names, *(row[key] for row in rows)])) for key, names in known.items()}
    return sorted(rows, key=lambda row: (row["gpu"], *(names.index(row[key]) for key, names in order.items())))


def show(console: Console, rows: list[dict], title: str, columns: dict = COLUMNS, wide: bool = False) -> None:
    """Prints a table of at most 100 columns for each GPU and dtype of the rows, with both and the commits in its title.

    Args:
        columns: one of the tables above. Its most important columns are shown, but none that is empty in every row.
        wide: show every column, on a console as wide as they need.
    """
    for (gpu, dtype), group in record.group_by(rows, lambda row: (row.get("gpu") or "no GPU", row.get("dtype"))).items():
        rivals = dict.fromkeys(row["against"] for row in group if row.get("against"))
        over = f"speed-up over {', '.join(rivals)}" if rivals else ""
        table = make_table(group, ", ".join(filter(None, (title, gpu, dtype, _describe_commits(group), over))), columns, wide)
        console.width = max(console.width, Console(width=1000).measure(table).maximum)  # rather wide than cut
        console.print(table)


def make_table(rows: list[dict], title: str, columns: dict = COLUMNS, wide: bool = False) -> Table:
    """For rich; no cell is cut. As in `show`."""
    narrow = next((narrow for name, narrow in NARROW.items() if globals()[name] is columns), columns)
    chosen = columns if wide else narrow
    if "copy %" in chosen:
        rows = [row | {"of_copy": compare_with_copy(row)} for row in rows]
    cells = {header: [write(row.get(key)) for row in rows] for header, (key, write) in chosen.items()}
    table = make_empty_table(title=title)
    for header in (header for header, values in cells.items() if wide or any(values) or not rows):
        table.add_column(header, justify="left" if header in _LEFT_ALIGNED else "right", no_wrap=header != "options")
    shown = [cells[column.header] for column in table.columns]
    for row, values in zip(rows, zip(*shown, strict=True), strict=False):
        table.add_row(*values, style="dim" if columns is COLUMNS and not row.get("against") else None)
    return table


def compare_with_copy(row: dict) -> float | None:
    """The rate at which a call reads its inputs and writes its outputs once, in GPU time, over that of a copy."""
    return row["ideal_bytes"] / row["copy_gbps"] / 1e3 / record.get_us(row) if row.get("ideal_bytes") else None


def _describe_commits(rows: list[dict]) -> str:
    """`commit 0123456`; of several the first and the last, by time."""
    found = list(dict.fromkeys(row["git_sha"][:7] for row in sorted(rows, key=lambda row: row["time"]) if row.get("git_sha")))
    if len(found) < 2:
        return f"commit {found[0]}" if found else ""
    return f"commits {found[0]} to {found[-1]}"


def render(rows: list[dict], kind: str, columns: dict = COLUMNS) -> str:
    """As text of one of FORMATS. CSV has every key as it was recorded, the others the columns given, with each row's GPU where
    there are several.
    """
    import pandas as pd  # half a second that --help need not wait

    if kind == "csv":
        return pd.DataFrame(rows).to_csv(index=False)
    if len({row.get("gpu") for row in rows}) > 1:
        columns = {"GPU": ("gpu", write_text)} | columns
    cells = [[write(row.get(key)) for key, write in columns.values()] for row in rows]
    if kind == "latex":
        frame = pd.DataFrame(cells, columns=list(columns))
        return frame.style.hide(axis="index").format(escape="latex").format_index(escape="latex", axis=1).to_latex(hrules=True)
    return render_markdown(list(columns), cells, [header for header in columns if header in _LEFT_ALIGNED])


def render_markdown(header: Sequence[str], rows: Iterable[Sequence[object]], names: Iterable[str] = ()) -> str:
    """A table in Markdown; the columns of `names` are aligned to the left, the others, numbers, to the right."""
    rules = ["---" if name in {*names} else "---:" for name in header]
    return render_lines((header, rules, *rows))


def write_head(header: str, *names: str) -> str:
    """The head of a table in Markdown, from `a | b`; the columns of `names` are aligned to the left, numbers to the right."""
    rule = "".join("---|" if header.strip() in names else "---:|" for header in header.split("|"))
    return f"| {header} |\n|{rule}\n"


def render_lines(rows: Iterable[Sequence[object]]) -> str:
    """Lines of a table in Markdown, for below a header."""
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in rows)
