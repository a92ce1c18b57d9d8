"""What README.md and docs show of committed rows: written between markers; figures are files in docs."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import torch
from triton import knobs

from ssd.registry import is_peer

from . import ablate, block, figure, record, result_tables, speedup_figure, step_figure, sweep, table, terminal_page
from .result_tables import MODES, join_words
from .shapes import DIRECTIONS
from .speedup_figure import HEADLINE

ROOT = Path(__file__).parent.parent
README = "README.md"
RESULTS = "docs/results.md"
SPEEDUPS_FIGURE = "docs/speedups.svg"
FIGURE = "docs/results.svg"
STEPS_FIGURE = "docs/workloads.svg"
ABLATION = "docs/ablation.md"
WORKLOADS = "docs/workloads.md"
LIBRARIES = "docs/drop-in.md"
TERMINAL = "docs/terminal.md"
_WIDTH = 128  # of a line of prose
_COMPARED = itemgetter("gpu", "against")
_GPU = itemgetter("gpu")
_FASTEST, _DEFAULT = "persistent", "auto"
_MEMORY = ("8b-b1", "8b-b4")  # the shapes whose memory is shown
_COSTS = "8b-b4"  # the shape at which the README says what the default costs


def tabulate_speedups(rows: list[dict], steps: list[dict]) -> str:
    """A sentence for each GPU; of one, the last by name, also a line for each layer of `HEADLINE`, with `persistent`'s gain.

    steps: rows of the sweep, for the training step of the model that has this layer.
    """
    compared = [row for row in rows if row.get("graph_speedup")]
    sentences, lines = [], []
    for (gpu, against), group in groupby(sorted(compared, key=_COMPARED), _COMPARED):
        group = list(group)
        sentence = (f"Speed-ups over {against} on one {gpu}, in bf16 and GPU time, from the least to the most of "
                    f"{len({row['shape'] for row in group})} shapes. The fastest variant: {_ranges(group)}.")
        if by_default := [row for row in group if row["variant"] == _DEFAULT]:
            sentence += f" The default, `auto`, which keeps no states: {_ranges(by_default)}."
        sentences.append(textwrap.fill(sentence, _WIDTH) + "\n")
        lines = _list_layers(gpu, group, steps) or lines
    table_of = [f"| `{_FASTEST}`, a layer of | {' | '.join(MODES.values())} | training step |",
                f"|---|{'---|' * (len(MODES) + 1)}", *lines]
    parts = [*sentences, "\n".join(table_of) + "\n"] if lines else sentences
    return "\n".join(parts) or "No GPU has run the bench beside mamba_ssm yet.\n"


def _list_layers(gpu: str, rows: list[dict], steps: list[dict]) -> list[str]:
    found = {(row["shape"], row["mode"]): row for row in rows if row["variant"] == _FASTEST}
    lines = []
    for shape, (model, tokens, workload) in HEADLINE.items():
        cells = [_compare(found.get((shape, mode))) for mode in MODES]
        if any(cells):
            lines.append(f"| {model}, {tokens} | {' | '.join(cells)} | {_compare_step(gpu, workload, steps)} |")
    return lines


def _ranges(rows: list[dict]) -> str:
    best: dict[str, dict[str, float]] = {mode: {} for mode in MODES}
    for row in rows:
        shapes = best[row["mode"]]
        shapes[row["shape"]] = max(row["graph_speedup"], shapes.get(row["shape"], 0))
    return join_words([f"{min(of.values()):.1f}x to {max(of.values()):.1f}x {MODES[mode]}" for mode, of in best.items() if of])


def _compare(row: dict | None) -> str:
    """The speed-up and our time; empty without a row."""
    if row is None:
        return ""
    return f"**{row['graph_speedup']:.1f}x** {row['graph_p50_us']:.0f} µs"


def _compare_step(gpu: str, workload: tuple[str, str] | None, steps: list[dict]) -> str:
    """The same for the training step of a model, with `persistent` inside, timed beside the rival; a dash without a row."""
    found = [row for row in steps if row["gpu"] == gpu and (row["workload"], row["preset"]) == workload
             and row["variant"] == _FASTEST and row["mixer"] == "ssd" and row["speedup"]]
    if not found:
        return "-"
    row = max(found, key=itemgetter("batch"))
    return f"**{row['speedup']:.1f}x** {row['p50_us'] / 1e3:.0f} ms"


def tabulate_costs(rows: list[dict]) -> str:
    """What the default and the fastest setting take at one shape: time, what is kept between layers, and the peak."""
    kept = {_describe_call(row): row["saved_mib"] for row in rows if row.get("saved_mib") is not None}
    backward = {_describe_call(row): row["graph_p50_us"] for row in rows if row["mode"] == "bwd"}
    shown = [row for row in rows if (row["shape"], row["dtype"], row["mode"]) == (_COSTS, "bf16", "fwd_bwd")
             and row["graph_p50_us"] and (row["variant"] in (_DEFAULT, _FASTEST) or is_peer(row["variant"]))]
    best: dict[tuple, dict] = {}
    for row in sorted(shown, key=itemgetter("graph_p50_us")):
        best.setdefault((row["gpu"], row["variant"], str(record.options(row))), row)
    parts = []
    for gpu, group in groupby(sorted(best.values(), key=lambda row: (row["gpu"], -row["graph_p50_us"])), _GPU):
        lines = [f"Shape `{_COSTS}` on one {gpu}:\n",
                 "| `variant=` | forward and backward, µs | backward, µs | kept between them, MiB | peak, MiB |",
                 "|---|---:|---:|---:|---:|"]
        for row in group:
            changed = record.changed_options(record.options(row))
            call = _describe_call(row)
            cells = (f"`{row['variant']}`{f' with `{changed}`' if changed else ''}", f"{row['graph_p50_us']:.0f}",
                     *("" if value is None else f"{value:.0f}" for value in (backward.get(call), kept.get(call))),
                     f"{row['peak_mib']:.0f}")
            lines.append(f"| {' | '.join(cells)} |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts) or f"No rows yet: no GPU has run forward and backward of {_COSTS}.\n"


def _describe_call(row: dict) -> tuple:
    """What the rows of several modes share that ran the same."""
    return *(row[key] for key in ("gpu", "shape", "variant", "chunk_size")), record.changed_options(record.options(row))


def write_all(out: Path = record.RESULTS, root: Path = ROOT, check: bool = False) -> bool:
    """Write every table and figure from the rows under `out`; True if nothing had to change. check: change nothing.

    Raises:
        ValueError: a line that is no row, or a page without its markers.
    """
    every_chunk, steps = table.read_latest(out, all_chunks=True), sweep.read_latest(out)
    current = write_bench(read_latest(out), steps, root, check)
    current &= write_memory(every_chunk, root, check)
    current &= write_terminal(read_latest(out), root, check)
    current &= write_blocks(block.read_latest(out), root, check)
    current &= write_libraries(read_latest(out), block.read_latest(out), root, check)
    current &= write_ablation(ablate.read_latest(out), root, check)
    current &= write_steps(steps, root, check)
    return write_trainings(record.read(out, bench="train"), root, check) and current


def write_bench(rows: list[dict], steps: list[dict], root: Path = ROOT, check: bool = False) -> bool:
    """As `write_all`, of rows of the bench."""
    rows = [row for row in rows if row["mode"] in MODES]
    picture = f"![Speed-ups over mamba_ssm, a pair of bars for each model's layer]({SPEEDUPS_FIGURE})\n\n"
    current = _put("speedups", picture + tabulate_speedups(rows, steps), root / README, check)
    current &= _put("results", result_tables.tabulate_results(rows, Path(FIGURE).name), root / RESULTS, check)
    current &= _draw(speedup_figure.draw, speedup_figure.points(rows), rows, root / SPEEDUPS_FIGURE, check)
    return _draw(figure.draw, figure.points(rows), rows, root / FIGURE, check) and current


def write_memory(rows: list[dict], root: Path = ROOT, check: bool = False) -> bool:
    """As `write_all`, of rows of the bench at every option and chunk size."""
    rows = [row for row in rows if row["dtype"] == "bf16"]
    current = _put("costs", tabulate_costs(rows), root / README, check)
    shown = [row for row in rows if row["shape"] in _MEMORY]
    return _put("memory", result_tables.tabulate_memory(shown), root / RESULTS, check) and current


def write_terminal(rows: list[dict], root: Path = ROOT, check: bool = False) -> bool:
    """As `write_all`, of rows of the bench; what is printed without a GPU is left as it is where there is one."""
    current = _put("terminal-gpu", terminal_page.print_recorded_run(rows), root / TERMINAL, check)
    if torch.cuda.is_available() or not knobs.runtime.interpret:
        return current
    printed = terminal_page.print_without_gpu()
    if terminal_page.mask_errors(printed) in terminal_page.mask_errors((root / TERMINAL).read_text()):
        return current
    return _put("terminal-cpu", printed, root / TERMINAL, check) and current


def write_blocks(rows: list[dict], root: Path = ROOT, check: bool = False) -> bool:
    """As `write_all`, of rows of the parts of a block that have a rival."""
    shown = [row for row in rows if row["gpu"] and row.get("against")]
    return _put("blocks", result_tables.tabulate_blocks(shown), root / RESULTS, check)


def write_libraries(rows: list[dict], parts: list[dict], root: Path = ROOT, check: bool = False) -> bool:
    """As `write_all`, of rows of the bench and of the parts of a block."""
    return _put("libraries", result_tables.tabulate_libraries(rows, parts), root / LIBRARIES, check)


def write_ablation(rows: list[dict], root: Path = ROOT, check: bool = False) -> bool:
    """As `write_all`, of rows of the ablation."""
    shown = [row for row in rows if row["gpu"] and row["mode"] in DIRECTIONS]
    shown.sort(key=itemgetter("gpu", "shape", "mode", "variant"))
    return _put("ablation", result_tables.tabulate_ablation(shown), root / ABLATION, check)


def write_trainings(rows: list[dict], root: Path = ROOT, check: bool = False) -> bool:
    """As `write_all`, of rows of trainings, on several GPUs and from several seeds."""
    current = _put("gpus", result_tables.tabulate_several_gpus(rows), root / WORKLOADS, check)
    return _put("seeds", result_tables.tabulate_several_seeds(rows), root / WORKLOADS, check) and current


def write_steps(rows: list[dict], root: Path = ROOT, check: bool = False) -> bool:
    """As `write_all`, of rows of the sweep."""
    rows = sorted((row for row in rows if row["gpu"] and record.has_default_options(row)), key=_GPU)
    current = _put("workloads", result_tables.tabulate_steps(rows, Path(STEPS_FIGURE).name), root / RESULTS, check)
    current &= _put("gains", result_tables.tabulate_gains(rows), root / WORKLOADS, check)
    return _draw(step_figure.draw, step_figure.points(rows), rows, root / STEPS_FIGURE, check) and current


def read_latest(out: Path = record.RESULTS) -> list[dict]:
    """Rows of the bench that are shown: named shapes in bf16, each variant as it comes, at its faster chunk size."""
    rows = [row for row in table.read_latest(out, compared=True, dtype="bf16")
            if not row["shape"].startswith("sweep-") and record.has_default_options(row)]
    return table.compare_with_least(rows, [row for row in rows if is_peer(row["variant"])])


def _put(section: str, written: str, page: Path, check: bool) -> bool:
    """Write between the section's markers; True if it was there already."""
    begin, end = f"<!-- {section}: written by `make readme` -->", f"<!-- end of {section} -->"
    text = page.read_text()
    if text.count(begin) != 1 or text.count(end) != 1:
        raise ValueError(f"{page.name}: expected the lines {begin!r} and {end!r} once each")
    updated = re.sub(f"{re.escape(begin)}.*{re.escape(end)}", lambda _: f"{begin}\n\n{written}\n{end}", text, flags=re.S)
    if not check:
        page.write_text(updated)
    return updated == text


def _draw(draw: Callable, shown: dict, rows: list[dict], path: Path, check: bool) -> bool:
    """Draw the figure unless it shows this; True if it did."""
    current = not rows or figure.drawn_from(path) == figure.fingerprint(shown)
    if not check and not current:
        draw(rows, path)
    return current
