"""Figures 3 and 4 and Table II: units, caches and shares of time of the SSM kernels."""

from collections import Counter

from ... import palette
from ...shapes import DIRECTIONS
from .. import classes
from ..definitions import Call
from ..gpus import find
from . import draw
from .figure import shorten

BASELINE = "baseline"
HIT_RATES = {"L2": "l2_hit_pct", "L2, warm": "l2_warm_hit_pct", "L1": "l1_hit_pct", "L1, warm": "l1_warm_hit_pct"}
STALLS = {"stall_long_scoreboard": "global memory (long scoreboard)", "stall_barrier": "other warps (barrier)",
          "stall_wait": "a fixed latency (wait)", "stall_math_pipe_throttle": "a busy unit (math pipe throttle)",
          "stall_gmma": "tensor cores (gmma)", "stall_no_instruction": "instructions (no instruction)"}
_OCCUPIED = ("registers", "occupancy_pct", "blocks", "block_cycles", "tensor_pct", "issue_pct", "shared_pct")
FMA_RATIO = 16  # the paper's: fused multiply-adds of an H100's tensor cores for one of its vector units, each clock


def baseline(calls: list[Call]) -> dict[str, Call]:
    """{mode: call} of the baseline."""
    return {call.row["mode"]: call for call in calls if call.row["variant"] == BASELINE and call.row["mode"] in DIRECTIONS}


def collect_ratios(calls: list[Call]) -> dict:
    """Figure 3, and what its line is held against; nothing without counters."""
    lines = [line for call in sorted(calls, key=lambda call: call.row["variant"] != BASELINE) for line in _ratios(call)]
    if not lines:
        return {}
    gpu = find(calls[0].row["gpu"])
    sheet = gpu and gpu.bf16_tflops.value / gpu.fp32_tflops.value
    labels = [f"{line['kernel']} ({DIRECTIONS[line['mode']]})" if line["variant"] == BASELINE else
              f"{line['kernel']}\n({DIRECTIONS[line['mode']]}, {line['variant']})" for line in lines]  # or bars had no room

    def plot(ax) -> None:
        draw.plot_bars(ax, labels, {"ratio": [line["ratio"] for line in lines]})
        ax.set_xlim(1, 4 * max(line["ratio"] for line in lines))
        ax.axvline(FMA_RATIO, color=palette.SERIES[1], linewidth=1, linestyle="--", label=f"{FMA_RATIO}, the paper's line")

    panel = draw.Panel(plot, lines, 1.0 + 0.3 * len(lines), {"xscale": "log", "xlabel": "tensor over vector FLOPs"})
    groups = {name: [line for line in lines if (line["variant"] == BASELINE) == own]
              for name, own in (("The baseline", True), ("Other variants", False))}
    return {
        "panels": {"tensor-vector": panel}, "count": len(lines), "gpu": gpu, "sheet": sheet,
        "between": sum(min(sheet, FMA_RATIO) <= line["ratio"] < max(sheet, FMA_RATIO) for line in lines) if sheet else 0,
        "modelled": sum(line["source"] != "counters" for line in lines),
        "groups": {name: {"count": len(found), "below": sum(line["ratio"] < FMA_RATIO for line in found),
                          "least": min(found, key=lambda line: line["ratio"])} for name, found in groups.items() if found}}


def _ratios(call: Call) -> list[dict]:
    """A line for each kernel with products and a ratio; the cost model knows the baseline's alone."""
    lines = []
    for kernel in call.kernels if call.row["mode"] in DIRECTIONS else ():
        done = classes.work(kernel) if call.row["variant"] == BASELINE else classes.read_counters(kernel)
        if done and done.tensor and done.ratio is not None:
            lines.append({"variant": call.row["variant"], "mode": call.row["mode"], "kernel": shorten(kernel["kernel"]),
                          "tensor": done.tensor, "vector": done.vector, "ratio": done.ratio, "source": done.source})
    return lines


def collect_shares(calls: list[Call]) -> list[tuple[str, float, dict]]:
    """Table II with its threshold swept: what it is of, the threshold, and {class: (kernels, per cent of their time)}."""
    return [(DIRECTIONS[mode] + ("" if recomputed else ", without recomputed kernels"), threshold,
             classes.compute_shares(call.kernels, threshold, recomputed))
            for mode, call in baseline(calls).items() for recomputed in ((True, False) if mode == "bwd" else (True,))
            for threshold in classes.THRESHOLDS]


def collect_hit_rates(calls: list[Call]) -> dict:
    """Figure 4, and which rates it leaves out; nothing without counters."""
    lines, odd = [], []
    for call in calls:
        of_call = {"variant": call.row["variant"], "mode": call.row["mode"]}
        for kernel in (kernel for kernel in call.kernels if "l2_hit_pct" in kernel):
            line = of_call | {"kernel": shorten(kernel["kernel"]), **{key: kernel.get(key) for key in HIT_RATES.values()}}
            lines.append(line)
            for what, key in HIT_RATES.items():
                if line[key] is not None and line[key] > 100:
                    odd.append(f"{what} of {line['kernel']} ({line['variant']}, {DIRECTIONS.get(line['mode'], line['mode'])})")
                    line[key] = None
    if not lines:
        return {}
    forward = [line for line in lines if line["mode"] == "fwd"]
    labels = [f"{line['kernel']} ({line['variant']})" for line in forward]
    series = {name: [line[key] for line in forward] for name, key in HIT_RATES.items()}
    series = {name: values for name, values in series.items() if any(value is not None for value in values)}
    panel = draw.Panel(lambda ax: draw.plot_bars(ax, labels, series), lines, 0.8 + 0.13 * len(series) * len(forward),
                       {"xlabel": "per cent of sectors that hit", "xlim": (0, 108)})
    return {
        "panels": {"hit-rates": panel}, "odd": odd, "missing": [name for name in HIT_RATES if name not in series],
        "gained": max((line["l2_warm_hit_pct"] - line["l2_hit_pct"] for line in forward
                       if None not in (line["l2_hit_pct"], line["l2_warm_hit_pct"])), default=None)}


def collect_stalls(calls: list[Call]) -> dict:
    """What each kernel occupies, and what its warps wait for; reasons: how many kernels wait most for each, commonest first."""
    lines = []
    for call in calls:
        for kernel in call.kernels:
            counted = {name: kernel[key] for key, name in STALLS.items() if key in kernel}
            reason = max(counted, key=counted.get, default=None)
            lines.append({
                "variant": call.row["variant"], "mode": call.row["mode"], "kernel": shorten(kernel["kernel"]),
                "waits_most_for": reason, "warps_waiting": counted.get(reason),
                "time_pct": 100 * kernel["ncu_us"] / call.row["ncu_us"], **{key: kernel.get(key) for key in _OCCUPIED}})
    reasons = Counter(line["waits_most_for"] for line in lines if line["waits_most_for"])
    return {"tables": {"kernels": lines}, "reasons": reasons.most_common()} if lines else {}
