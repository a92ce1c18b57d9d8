"""Figure 2: FLOPs for a byte and a second, of kernels and calls, against what the GPU can do."""

from operator import itemgetter

from ssd import cost

from ... import palette, record
from .. import classes
from ..definitions import Call, gbps
from ..gpus import GPU, GPUS, find
from . import draw
from .figure import name_run, shorten

_APART = 1.48  # heights of two labels, the higher over the lower: a line of text
_LEFT, _RIGHT, _LOW, _HIGH = 0.002, 1e4, 0.3, 2e3  # of the axes


def points(calls: list[Call]) -> list[dict]:
    """A line for each kernel of the baseline and for each whole call.

    FLOPs of kernels are the counters' or the cost model's; those of calls the ideal operator's, which every variant computes.
    Bytes are the counters'; by_model is the intensity with the cost model's bytes.
    """
    lines = []
    for call in calls:
        found = []
        for kernel in call.kernels if call.row["variant"] == "baseline" else ():
            done, model = classes.work(kernel), classes.model(kernel)
            if model and done.tensor + done.vector:
                found.append((shorten(kernel["kernel"]), done.tensor + done.vector, kernel["dram_bytes"], kernel["ncu_us"],
                              model.bytes))
        if call.wall_us:
            found.append(("all", call.ideal.flops, call.dram_bytes, call.wall_us, call.ideal.bytes))
        lines += [{"variant": call.row["variant"], "mode": call.row["mode"], "kernel": name, "flops": flops, "bytes": n_bytes,
                   "us": us, "intensity": flops / n_bytes, "by_model": flops / model_bytes, "tflops": flops / us / 1e6,
                   "gbps": gbps(n_bytes, us)}
                  for name, flops, n_bytes, us, model_bytes in found]
    return lines


def _rates(kernels: list[dict]) -> tuple[float | None, float | None, float]:
    """FLOPs a byte, TFLOP/s and GB/s of kernels that ran one after another; FLOPs where all of theirs were counted."""
    n_bytes, us = sum(kernel["dram_bytes"] for kernel in kernels), sum(kernel["ncu_us"] for kernel in kernels)
    done = [classes.read_counters(kernel) for kernel in kernels]
    flops = None if None in done else sum(work.tensor + work.vector for work in done)
    return flops and flops / n_bytes, flops and flops / us / 1e6, gbps(n_bytes, us)


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
                        arrowprops={"arrowstyle": "-", "color": palette.MUTED, "linewidth": 0.5, "shrinkB": 3})


def collect(calls: list[Call], rows: list[dict]) -> dict:
    """Rates of whole models and of Mamba-1's scan, by counters; of the SSM kernels the figure and its lines, where counted.
    All of one GPU, under its own roofs.
    """
    of_scan = record.read(rows, bench="block_counters", part="selective_scan")
    scans = record.keep_last_runs(of_scan, itemgetter("shape", "mode", "variant"))
    models = record.keep_last_runs(record.read(rows, bench="step_counters"), name_run)
    found = {"models": {name: _rates(kernels) for name, kernels in models.items()},
             "scans": {which: _rates(kernels) for which, kernels in sorted(scans.items())}, "lines": []}
    gpu, lines = find(calls[0].row["gpu"]) if calls else None, points(calls)
    if gpu is None or not lines:
        return found
    bounds = find_roofs(gpu, calls, rows)
    chosen = [line for line in lines if line["mode"] == "fwd"]

    def plot(ax) -> None:
        for n, (name, (memory, tensor)) in enumerate(bounds.items()):
            ridge = tensor * 1e3 / memory
            ax.plot([_LEFT, ridge, _RIGHT], [_LEFT * memory / 1e3, tensor, tensor], color=palette.MUTED, linewidth=1,
                    linestyle=("-", "--")[n], label=name)
        for line in chosen:
            whole = line["kernel"] == "all"
            ax.plot(line["intensity"], line["tflops"], "D" if whole else "o", color=draw.colour(line["variant"]),
                    markersize=7 if whole else 5)
        _label(ax, chosen)
        ax.grid(which="major")

    axes = {"xscale": "log", "yscale": "log", "xlabel": "FLOPs a byte of DRAM traffic", "ylabel": "TFLOP/s",
            "xlim": (_LEFT, _RIGHT), "ylim": (_LOW, _HIGH)}
    ridge = gpu.bf16_tflops.value * 1e3 / gpu.hbm_gbps.value
    return found | {"panels": {"roofline": draw.Panel(plot, lines, 3.6, axes)}, "lines": lines, "ridge": ridge,
                    "shown": len(chosen), "bounds": bounds,
                    "below": sum(line["intensity"] < ridge for line in chosen),
                    "calibrations": record.read(rows, bench="calibration")}


def find_roofs(gpu: GPU, calls: list[Call], rows: list[dict]) -> dict[str, tuple[float, float]]:
    """{roof: (GB/s, TFLOP/s)}: the data sheet's, and what was measured on this GPU, where both are known: the copy beside a
    call, and the fastest matmul beside training steps; of an H200, whose older rows have none, that in `ssd.cost`.
    """
    copies = [call.timed["copy_gbps"] for call in calls if call.timed]
    products = [row["peak_tflops"] for row in record.read(rows, bench="step") if row.get("peak_tflops")]
    if not products and gpu is GPUS["h200"]:
        products = [cost.H200.flops / 1e12]
    measured = {"measured": (copies[0], max(products))} if copies and products else {}
    return {"data sheet": (gpu.hbm_gbps.value, gpu.bf16_tflops.value)} | measured
