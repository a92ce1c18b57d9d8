"""Figures 3 and 4 and Table II: units, caches and shares of time of the SSM kernels."""

from __future__ import annotations

from collections import Counter

from ...shapes import DIRECTIONS
from .. import classes
from ..classes import BOTH, TENSOR, UNKNOWN, VECTOR
from ..definitions import Call
from ..gpus import GPU, find
from . import draw
from .parts import NOT_YET, Figure, Section, Table, shorten, to_cell

BASELINE = "baseline"
_HIT_RATES = {"L2": "l2_hit_pct", "L2, warm": "l2_warm_hit_pct", "L1": "l1_hit_pct", "L1, warm": "l1_warm_hit_pct"}
_STALLS = {"stall_long_scoreboard": "global memory (long scoreboard)", "stall_barrier": "other warps (barrier)",
           "stall_wait": "a fixed latency (wait)", "stall_math_pipe_throttle": "a busy unit (math pipe throttle)",
           "stall_gmma": "tensor cores (gmma)", "stall_no_instruction": "instructions (no instruction)"}
FMA_RATIO = 16  # the paper's: fused multiply-adds of an H100's tensor cores for one of its vector units, each clock


def baseline(calls: list[Call]) -> dict[str, Call]:
    """{mode: call} of the baseline."""
    return {call.row["mode"]: call for call in calls if call.row["variant"] == BASELINE and call.row["mode"] in DIRECTIONS}


def ratios(calls: list[Call]) -> Section:
    """Figure 3."""
    title = "Tensor to vector FLOPs"
    lines = [line for call in sorted(calls, key=lambda call: call.row["variant"] != BASELINE) for line in _ratios(call)]
    if not lines:
        return Section(title, (f"Figure 3 of the paper: {NOT_YET}.",))
    gpu = find(calls[0].row["gpu"])
    labels = [f"{line['kernel']} ({DIRECTIONS[line['mode']]})" if line["variant"] == BASELINE else
              f"{line['kernel']}\n({DIRECTIONS[line['mode']]}, {line['variant']})" for line in lines]  # or bars had no room

    def plot(ax) -> None:
        draw.bars(ax, labels, {"ratio": [line["ratio"] for line in lines]})
        ax.set_xlim(1, 4 * max(line["ratio"] for line in lines))
        ax.axvline(FMA_RATIO, color=draw.SERIES[1], linewidth=1, linestyle="--", label=f"{FMA_RATIO}, the paper's line")

    svg = draw.chart(plot, 1.0 + 0.3 * len(lines), xscale="log", xlabel="tensor over vector FLOPs")
    groups = {name: [line for line in lines if (line["variant"] == BASELINE) == own]
              for name, own in (("The baseline", True), ("Other variants", False))}
    see = "Tensor FLOPs for one vector FLOP. " + " ".join(_least(name, found) for name, found in groups.items() if found)
    note = "Bars without a variant's name are of the baseline, whose kernels are a stage each, as the paper's are."
    return Section(title, (f"{_line(lines, gpu)} {_sources(lines)} {note}", Figure("tensor-vector", svg, see, lines)))


def _ratios(call: Call) -> list[dict]:
    """A line for each kernel with products and a ratio; the cost model knows the baseline's alone."""
    lines = []
    for kernel in call.kernels if call.row["mode"] in DIRECTIONS else ():
        done = classes.work(kernel) if call.row["variant"] == BASELINE else classes.read_counted(kernel)
        if done and done.tensor and done.ratio is not None:
            lines.append({"variant": call.row["variant"], "mode": call.row["mode"], "kernel": shorten(kernel["kernel"]),
                          "tensor": done.tensor, "vector": done.vector, "ratio": done.ratio, "source": done.source})
    return lines


def _least(name: str, lines: list[dict]) -> str:
    below, least = sum(line["ratio"] < FMA_RATIO for line in lines), min(lines, key=lambda line: line["ratio"])
    return (f"{name}: {below or 'none'} of {len(lines)} kernels that do both {'are' if below > 1 else 'is'} below {FMA_RATIO}; "
            f"the lowest is {least['kernel']} with {least['ratio']:.0f}.")


def _line(lines: list[dict], gpu: GPU | None) -> str:
    """What the ratio is held against."""
    said = (f"Below {FMA_RATIO} tensor FLOPs for one vector FLOP the vector units bind, says the paper: an H100's tensor cores "
            f"do {FMA_RATIO} fused multiply-adds in FP16 in the clock in which its vector units do one.")
    if gpu is None:
        return said
    sheet = gpu.bf16_tflops.value / gpu.fp32_tflops.value
    if round(sheet, 1) == FMA_RATIO:
        return said
    between = sum(min(sheet, FMA_RATIO) <= line["ratio"] < max(sheet, FMA_RATIO) for line in lines)
    why = ", since that of the tensor cores is at a lower clock" if sheet < FMA_RATIO else ""
    return (f"{said} By the rates in the {gpu.name}'s data sheet the ratio is {sheet:.1f}{why}. The line here is {FMA_RATIO}; "
            f"{between or 'no'} kernel{'s lie' if between > 1 else ' lies'} between the two.")


def _sources(lines: list[dict]) -> str:
    """Where the FLOPs are from."""
    modelled = sum(line["source"] != "counters" for line in lines)
    if not modelled:
        return "All of these FLOPs were counted by ncu."
    counted = "the others' were counted by ncu" if modelled < len(lines) else f"counted FLOPs: {NOT_YET}"
    return (f"The FLOPs of {modelled} of these {len(lines)} kernels are the cost model's, {counted}. The model has the least "
            "vector work that a kernel's formula needs, neither addresses, conversions and masks nor what tiles do twice. More "
            "is executed, so counted ratios are lower.")


def table_two(calls: list[Call]) -> Section:
    """Table II with its threshold swept."""
    title = "Kernels by the units they use, and their shares of time"
    rows = []
    for mode, call in baseline(calls).items():
        for recomputed in (True, False) if mode == "bwd" else (True,):
            for threshold in classes.THRESHOLDS:
                found = classes.compute_shares(call.kernels, threshold, recomputed)
                what = DIRECTIONS[mode] + ("" if recomputed else ", without recomputed kernels")
                rows.append((what, f"{100 * threshold:g} %",
                             *(f"{found[kind][0]}: {found[kind][1]:.1f} %" for kind in (TENSOR, VECTOR, BOTH, UNKNOWN))))
    if not rows:
        return Section(title, (f"Table II of the paper: {NOT_YET}.",))
    note = ("All kernels here are the baseline's. A unit counts as used above a threshold of the kernel's FLOPs; ours is "
            f"{100 * classes.THRESHOLD:g} %, and the table shows what becomes of others. Each cell: how many kernels, and "
            "their share of the time under ncu. FLOPs are the cost model's where ncu counted none. A kernel that only adds up "
            "partial sums is not in the model: not known.")
    return Section(title, (note, Table(("", "threshold", TENSOR, VECTOR, BOTH, UNKNOWN), rows, 2)))


def caches(calls: list[Call]) -> Section:
    """Figure 4."""
    title = "Cache hit rates"
    lines, odd = _hit_rates(calls)
    if not lines:
        return Section(title, (f"Figure 4 of the paper: {NOT_YET}.",))
    forward = [line for line in lines if line["mode"] == "fwd"]
    labels = [f"{line['kernel']} ({line['variant']})" for line in forward]
    series = {name: [line[key] for line in forward] for name, key in _HIT_RATES.items()}
    series = {name: values for name, values in series.items() if any(value is not None for value in values)}
    svg = draw.chart(lambda ax: draw.bars(ax, labels, series), 0.8 + 0.13 * len(series) * len(forward),
                     xlabel="per cent of sectors that hit", xlim=(0, 108))
    means = ", ".join(f"{call.row['l2_hit_pct']:.0f} % ({call.row['variant']})" for call in calls
                      if call.row["mode"] == "fwd" and "l2_hit_pct" in call.row)
    see = (f"L2, cold, of whole forwards, weighted with time: {means}. A lower rate is no loss where fewer tiles are read a "
           "second time.")
    if gained := [line["l2_warm_hit_pct"] - line["l2_hit_pct"] for line in forward
                  if None not in (line["l2_hit_pct"], line["l2_warm_hit_pct"])]:
        see += f" Warm, L2 hits at most {max(gained):.0f} points more often."
    note = "Caches are cold where a kernel begins, and reuse between kernels cannot show; or warm, as the last one left them."
    missing = [name for name in _HIT_RATES if name not in series]
    note += f" {'; '.join(missing)}: {NOT_YET}." if missing else ""
    note += f" Left out, since ncu gives more than 100 %: {'; '.join(odd)}." if odd else ""
    return Section(title, (note, Figure("hit-rates", svg, see, lines)))


def _hit_rates(calls: list[Call]) -> tuple[list[dict], list[str]]:
    """A line for each kernel; and the names of rates above 100 %, which are None in it."""
    lines, odd = [], []
    for call in calls:
        of_call = {"variant": call.row["variant"], "mode": call.row["mode"]}
        for kernel in (kernel for kernel in call.kernels if "l2_hit_pct" in kernel):
            line = of_call | {"kernel": shorten(kernel["kernel"]), **{key: kernel.get(key) for key in _HIT_RATES.values()}}
            lines.append(line)
            for what, key in _HIT_RATES.items():
                if line[key] is not None and line[key] > 100:
                    odd.append(f"{what} of {line['kernel']} ({line['variant']}, {DIRECTIONS.get(line['mode'], line['mode'])})")
                    line[key] = None
    return lines, odd


def registers(calls: list[Call]) -> tuple[str, Table]:
    """What each kernel occupies, and what its warps wait for."""
    kernels = [(call, kernel, _stall(kernel)) for call in calls for kernel in call.kernels]
    rows = [(call.row["variant"], DIRECTIONS.get(call.row["mode"], call.row["mode"]), shorten(kernel["kernel"]), reason or "-",
             to_cell(warps, 1), to_cell(100 * kernel["ncu_us"] / call.row["ncu_us"], 1), to_cell(kernel.get("registers")),
             to_cell(kernel.get("occupancy_pct"), 1), to_cell(kernel.get("blocks")), to_cell(kernel.get("block_cycles")),
             to_cell(kernel.get("tensor_pct"), 1), to_cell(kernel.get("issue_pct"), 1), to_cell(kernel.get("shared_pct"), 1))
            for call, kernel, (reason, warps) in kernels]
    table = Table(("variant", "", "kernel", "waits most for", "warps waiting", "time %", "registers", "occupancy %", "blocks",
                   "block cycles", "tensor %", "issue %", "shared memory %"), rows, 4)
    reasons = Counter(reason for _, _, (reason, _) in kernels if reason)
    if not reasons:
        return f"What warps wait for: {NOT_YET}.", table
    [(most, count)] = reasons.most_common(1)
    said = ("Warps waiting: how many of a scheduler's warps, on average, wait for what is named whenever it issues an "
            f"instruction. That is the largest of the {len(_STALLS)} reasons that were counted; ncu knows more. {count} of "
            f"{reasons.total()} kernels wait most for {most}.")
    return said, table


def _stall(kernel: dict) -> tuple[str | None, float | None]:
    """The reason for which most warps wait, and how many for each instruction that is issued."""
    counted = {name: kernel[key] for key, name in _STALLS.items() if key in kernel}
    reason = max(counted, key=counted.get, default=None)
    return reason, counted.get(reason)
