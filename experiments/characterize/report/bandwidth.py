"""How much of the memory's bandwidth the kernels use, and what becomes of the paper's advice."""

from ... import palette
from .. import definitions
from ..definitions import DATASHEET, NCU, Call, Utilisation, count_vector_flops, gbps
from ..gpus import find
from . import draw

PAPER_PERCENT = 57.5
_MEANS = {"U": "mean of kernels", "W": "weighted with time", "G": "bytes over time"}
_COARSE, _ROUNDING = 5, 0.01  # ncu's per cent have two digits behind the point: what is less says little
BUSY = 80  # per cent; no unit is kept busier by a kernel that also waits for others
ISSUE = "issue slots"  # which every vector instruction takes
_UNITS = {"DRAM": "dram_pct", "tensor cores": "tensor_pct", ISSUE: "issue_pct", "shared memory": "shared_pct"}


def collect(calls: list[Call]) -> dict:
    """Utilisation by three definitions against three peaks, and what each call did; nothing without calls, which are of one
    GPU.
    """
    if not calls:
        return {}
    lines = [{"variant": call.row["variant"], "mode": call.row["mode"], "us": call.wall_us, "peak": name, **found._asdict()}
             for call in calls for name, found in definitions.compute_utilisations(call).items()]
    peak, _ = main_peak(calls[0])
    shown = [line for line in lines if line["peak"] == DATASHEET] or [line for line in lines if line["peak"] == NCU]
    labels = [f"{line['variant']}, {line['mode']}" + (f"\n{line['us']:,.0f} µs" if line["us"] else "") for line in shown]

    def plot(ax) -> None:
        draw.plot_bars(ax, labels, {f"{name}, {what}": [line[name] for line in shown] for name, what in _MEANS.items()})
        ax.axvline(PAPER_PERCENT, color=palette.MUTED, linewidth=1, linestyle="--", label=f"{PAPER_PERCENT} %, the paper's")

    panel = draw.Panel(plot, lines, 1.0 + 0.5 * len(shown), {"xlabel": f"per cent of {peak}", "xlim": (0, 100)})
    return {
        "panels": {"utilisation": panel}, "peak": peak, "work": list(map(_describe_work, calls)),
        "apart": max(shown, key=lambda line: abs(line["U"] - line["W"])),
        "other_runs": [f"{call.row['variant']} {call.row['mode']}" for call in calls if _mixes_runs(call)]}


def main_peak(call: Call) -> tuple[str, Utilisation]:
    """The peak that numbers without a table are of, and what is used of it: the data sheet's, ncu's where that is not known."""
    found = definitions.compute_utilisations(call)
    return ("the data sheet's peak", found[DATASHEET]) if DATASHEET in found else ("ncu's peak", found[NCU])


def _describe_work(call: Call) -> dict:
    wall, light = call.wall_us, definitions.compute_speed_of_light(call)
    return call.row | {
        "us": wall, "dram_mb": call.dram_bytes / 1e6, "amplification": definitions.compute_amplification(call),
        "effective": wall and gbps(call.ideal.bytes, wall), "measured": wall and gbps(call.dram_bytes, wall),
        "of_floor": wall and 100 * light}


def units_in_use(call: Call) -> dict[str, float]:
    """How busy each unit is that ncu counted, in per cent, the busiest first."""
    use = {name: call.row[key] for name, key in _UNITS.items() if key in call.row}
    return {name: use[name] for name in sorted(use, key=use.get, reverse=True)}


def share_vector_flops(call: Call) -> tuple[float, float] | None:
    """Vector FLOPs in 1e9, and their per cent of what the data sheet's rate allows in the kernels' time under ncu."""
    counted = [count_vector_flops(kernel) for kernel in call.kernels]
    gpu = find(call.row["gpu"])
    if None in counted or gpu is None:
        return None
    tflops = sum(counted) / sum(kernel["ncu_us"] for kernel in call.kernels) / 1e6
    return sum(counted) / 1e9, 100 * tflops / gpu.fp32_tflops.value


def _mixes_runs(call: Call) -> bool:
    """Rows had ncu's times of its run over cold caches at first, beside bytes and per cent of that over warm ones.

    What 100 % is, by bytes, time and per cent, is then not the same for all kernels of a call.
    """
    peaks = [100 * gbps(kernel["dram_bytes"], kernel["ncu_us"]) / kernel["dram_pct"] for kernel in call.kernels
             if kernel["dram_pct"] > _COARSE]
    return bool(peaks) and max(peaks) > (1 + _ROUNDING) * min(peaks)
