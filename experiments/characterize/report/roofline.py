"""Figure 2: FLOPs for a byte and a second, of kernels and calls, against what the GPU can do."""

from __future__ import annotations

from operator import itemgetter
from pathlib import Path

from ssd import cost

from ... import record
from ...shapes import DIRECTIONS
from .. import classes
from ..definitions import Call, gbps
from ..gpus import find
from . import draw
from .parts import NOT_YET, Figure, Section, Table, keep_last_runs, shorten, to_cell

_RATES = ("FLOPs a byte", "TFLOP/s", "GB/s")
_APART = 1.6  # heights of two labels, the higher over the lower: a line of text
_LEFT, _RIGHT, _LOW, _HIGH = 0.01, 1e4, 0.3, 2e3  # of the axes


def points(calls: list[Call]) -> list[dict]:
    """A line for each kernel of the baseline and for each whole call.

    FLOPs of kernels are the counters' or the cost model's; those of calls the ideal operator's, which every variant computes.
    Bytes are the counters'; by_model is the intensity with the cost model's bytes.
    """
    lines = []
    for call in calls:
        name = {"variant": call.row["variant"], "mode": call.row["mode"]}
        if call.row["variant"] == "baseline":
            for kernel in call.kernels:
                done, model = classes.work(kernel), classes.model(kernel)
                flops = done.tensor + done.vector
                if model and flops:
                    lines.append({**name, "kernel": shorten(kernel["kernel"]), "flops": flops, "bytes": kernel["dram_bytes"],
                                  "us": kernel["ncu_us"], "intensity": flops / kernel["dram_bytes"],
                                  "by_model": flops / model.bytes, "tflops": flops / kernel["ncu_us"] / 1e6})
        if call.wall_us:
            ideal = call.ideal
            lines.append({**name, "kernel": "all", "flops": ideal.flops, "bytes": call.dram_bytes, "us": call.wall_us,
                          "intensity": ideal.flops / call.dram_bytes, "by_model": ideal.flops / ideal.bytes,
                          "tflops": ideal.flops / call.wall_us / 1e6})
    return lines


def models(out: Path) -> Table | None:
    """What a training step of each model does, by counters: the left half; None without rows."""
    lines = [(name, *_rates(rows)) for name, rows in keep_last_runs(record.read(out, bench="step_counters")).items()]
    return Table(("run", *_RATES), lines) if lines else None


def scans(out: Path) -> Table | None:
    """What Mamba-1's selective scan does, by counters, ours and upstream's; None without rows."""
    rows = record.read(out, bench="block_counters", part="selective_scan")
    calls = keep_last_runs(rows, itemgetter("shape", "mode", "variant"))
    lines = [(shape, DIRECTIONS.get(mode, mode), variant, *_rates(kernels))
             for (shape, mode, variant), kernels in sorted(calls.items())]
    return Table(("Mamba-1's selective scan", "", "variant", *_RATES), lines, 3) if lines else None


def _rates(kernels: list[dict]) -> tuple[str, ...]:
    """Of kernels that ran one after another, the cells of _RATES; FLOPs where all of theirs were counted."""
    n_bytes, us = sum(kernel["dram_bytes"] for kernel in kernels), sum(kernel["ncu_us"] for kernel in kernels)
    done = [classes.read_counted(kernel) for kernel in kernels]
    flops = None if None in done else sum(work.tensor + work.vector for work in done)
    return to_cell(flops and flops / n_bytes, 1), to_cell(flops and flops / us / 1e6, 1), to_cell(gbps(n_bytes, us))


def _label(ax, lines: list[dict]) -> None:
    """Names of points in two columns, the left half's and the right half's, by height and never closer than a line of text."""
    by_intensity = sorted(lines, key=lambda line: line["intensity"])
    middle = len(lines) // 2
    for half, at, align in ((by_intensity[:middle], 1.15 * _LEFT, "left"), (by_intensity[middle:], 0.8 * _RIGHT, "right")):
        height = _LOW
        for line in sorted(half, key=lambda line: line["tflops"]):
            height = max(height * _APART, line["tflops"])
            ax.annotate(line["variant"] if line["kernel"] == "all" else line["kernel"], (line["intensity"], line["tflops"]),
                        (at, height), ha=align, va="center",
                        arrowprops={"arrowstyle": "-", "color": draw.MUTED, "linewidth": 0.5, "shrinkB": 3})


def section(calls: list[Call], out: Path) -> Section:
    """Figure 2; its left half as a table."""
    title = "Arithmetic intensity and roofline"
    gpu = find(calls[0].row["gpu"]) if calls else None
    left = models(out) or f"Of whole models, the left half of the paper's figure: {NOT_YET}."
    scan = [f"Of Mamba-1's selective scan alone: {NOT_YET}; `make block PART=selective_scan ARGS=--counters`."]
    if counted := scans(out):
        scan = ["Mamba-1's selective scan, with the bytes of DRAM over warm caches: a small call finds its inputs in L2, and "
                "so has many FLOPs for each byte.", counted]
    lines = points(calls)
    if gpu is None or not lines:
        return Section(title, (f"Of the SSM kernels: {NOT_YET}.", left, *scan))
    copy = next((call.timed["copy_gbps"] for call in calls if call.timed), None)
    bounds = {"data sheet": (gpu.hbm_gbps.value, gpu.bf16_tflops.value)}
    if copy:
        bounds["measured"] = (copy, cost.H200.flops / 1e12)
    chosen = [line for line in lines if line["mode"] == "fwd"]

    def plot(ax) -> None:
        for n, (name, (memory, tensor)) in enumerate(bounds.items()):
            ridge = tensor * 1e3 / memory
            ax.plot([_LEFT, ridge, _RIGHT], [_LEFT * memory / 1e3, tensor, tensor], color=draw.MUTED, linestyle=("-", "--")[n],
                    linewidth=1, label=name)
        for line in chosen:
            whole = line["kernel"] == "all"
            ax.plot(line["intensity"], line["tflops"], "D" if whole else "o", color=draw.colour(line["variant"]),
                    markersize=7 if whole else 5)
        _label(ax, chosen)
        ax.grid(which="major")

    svg = draw.chart(plot, 3.6, xscale="log", yscale="log", xlabel="FLOPs a byte of DRAM traffic", ylabel="TFLOP/s",
                     xlim=(_LEFT, _RIGHT), ylim=(_LOW, _HIGH))
    ridge = gpu.bf16_tflops.value * 1e3 / gpu.hbm_gbps.value
    below = sum(line["intensity"] < ridge for line in chosen)
    see = (f"{below} of {len(chosen)} points of the forward lie left of the ridge at {ridge:.0f} FLOPs a byte, where memory is "
           "the bound; fewer bytes for the same result move a whole call (diamonds) to the right and up.")
    note = ("FLOPs of a kernel are the cost model's, products and vector operations, as far as ncu did not count them; those "
            "of a whole call are the ideal operator's. The measured roof is the copy of the same run and an 8192-cubed matmul.")
    if found := record.read(out, bench="calibration"):
        note += f" Of a product of {found[-1]['n']} cubed, ncu finds {100 * found[-1]['flops_found']:.1f} % of its FLOPs."
    cells = [(DIRECTIONS.get(line["mode"], line["mode"]), line["variant"], line["kernel"], to_cell(line["intensity"], 1),
              to_cell(line["by_model"], 1), to_cell(line["tflops"], 1), to_cell(gbps(line["bytes"], line["us"])))
             for line in lines]
    table = Table(("", "variant", "kernel", "FLOPs a byte, counters", "FLOPs a byte, cost model", "TFLOP/s", "GB/s"), cells, 3)
    return Section(title, (note, Figure("roofline", svg, see, chosen), table, left, *scan))
