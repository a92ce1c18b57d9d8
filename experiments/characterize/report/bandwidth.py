"""How much of the memory's bandwidth the kernels use, how long their blocks live, and what becomes of the paper's advice."""

from __future__ import annotations

from .. import definitions
from ..definitions import COPY, DATASHEET, NCU, Call, Utilisation, count_vector_flops
from ..gpus import find
from . import draw, kernels
from .parts import NOT_YET, Figure, Section, Table, to_cell

PAPER_PERCENT = 57.5
_COARSE, _ROUNDING = 5, 0.01  # ncu's per cent have two digits behind the point: what is less says little
BUSY = 80  # per cent; no unit is kept busier by a kernel that also waits for others
_ISSUE = "issue slots"
_UNITS = {"DRAM": "dram_pct", "tensor cores": "tensor_pct", _ISSUE: "issue_pct", "shared memory": "shared_pct"}


def section(calls: list[Call]) -> Section:
    """Utilisation by three definitions against three peaks, and the claims."""
    title = "Bandwidth, and how long blocks live"
    if not calls:
        return Section(title, (f"Utilisation, block lifetime and occupancy: {NOT_YET}.",))
    lines = []
    for call in calls:
        for name, found in definitions.utilisations(call).items():
            lines.append({"variant": call.row["variant"], "mode": call.row["mode"], "peak": name, **found._asdict()})
    peak, _ = main_peak(calls[0])
    shown = [line for line in lines if line["peak"] == DATASHEET] or [line for line in lines if line["peak"] == NCU]
    labels = [f"{line['variant']}, {line['mode']}" for line in shown]

    def plot(ax) -> None:
        draw.bars(ax, labels, {name: [line[name] for line in shown] for name in "UWG"})
        ax.axvline(PAPER_PERCENT, color=draw.MUTED, linewidth=1, linestyle="--", label=f"{PAPER_PERCENT} %, the paper's")

    svg = draw.chart(plot, 1.0 + 0.5 * len(shown), xlabel=f"per cent of {peak}", xlim=(0, 80))
    apart = max(shown, key=lambda line: abs(line["U"] - line["W"]))
    points = abs(apart["U"] - apart["W"])
    see = (f"Of {peak}, U and W of one call are up to {points:.0f} points apart ({apart['variant']}, "
           f"{apart['mode']}), so it matters which the paper's {PAPER_PERCENT} % is. Nor is more always better: see the bytes "
           "below.")
    note = ("U: mean over kernels; W: weighted with time; G: DRAM bytes over the peak times the call's own time, launches and "
            "gaps included. " + _other_commits(calls) + _other_runs(calls))
    cells = [(line["variant"], line["mode"], line["peak"], *(to_cell(line[name], 1) for name in "UWG")) for line in lines]
    return Section(title, (note.strip(), Figure("utilisation", svg, see, lines),
                           Table(("variant", "mode", "peak", "U %", "W %", "G %"), cells, 3), _work(calls),
                           *claims(calls), *kernels.registers(calls)))


def main_peak(call: Call) -> tuple[str, Utilisation]:
    """The peak that numbers without a table are of, and what is used of it: the data sheet's, ncu's where that is not known."""
    found = definitions.utilisations(call)
    return ("the data sheet's peak", found[DATASHEET]) if DATASHEET in found else ("ncu's peak", found[NCU])


def _work(calls: list[Call]) -> Table:
    rows = []
    for call in calls:
        wall, row = call.wall_us, call.row
        rows.append((
            row["variant"], row["mode"], to_cell(wall), to_cell(row["launches"]), to_cell(call.dram_bytes / 1e6),
            to_cell(definitions.amplification(call), 2),
            to_cell(wall and definitions.gbps(call.ideal.bytes, wall)),
            to_cell(wall and definitions.gbps(call.dram_bytes, wall)),
            to_cell(wall and 100 * definitions.speed_of_light(call), 1), to_cell(row.get("blocks")),
            to_cell(row.get("block_cycles")), to_cell(row.get("occupancy_pct"), 1), to_cell(row.get("l2_hit_pct"), 1)))
    return Table(("variant", "mode", "us", "launches", "DRAM MB", "times the ideal's bytes", "effective GB/s", "measured GB/s",
                  "of the floor %", "blocks", "block cycles", "occupancy %", "L2 hits %, cold"), rows, 2)


def claims(calls: list[Call]) -> list[str]:
    """The paper's three, each confirmed or refuted by the forwards' counters."""
    by_name = {call.row["variant"]: call for call in calls if call.row["mode"] == "fwd"}
    if not {"baseline", "fused", "persistent"} <= by_name.keys():
        return [f"The paper's claims on fusion and persistent blocks: {NOT_YET}."]
    base, fused, last = (by_name[name] for name in ("baseline", "fused", "persistent"))
    (peak, before), (_, after) = map(main_peak, (base, last))
    lived = [call.row.get("block_cycles") for call in (base, last)]
    lives = f"{lived[1] / lived[0]:.0f} times as long" if all(lived) else f"how much longer: {NOT_YET}"
    hits = [call.row.get("l2_hit_pct") for call in (base, fused)]
    l2_hits = NOT_YET if None in hits else f"from {hits[0]:.0f} to {hits[1]:.0f} %"
    return [
        f"**Fusion saves the round trip through L2: {_verdict(fused.dram_bytes < base.dram_bytes)} as far as DRAM shows it.** "
        f"DRAM traffic of the forward goes from {base.dram_bytes / 1e6:,.0f} MB (baseline) to {fused.dram_bytes / 1e6:,.0f} MB "
        f"(`fused`). What goes through L2 itself was not counted; its hit rate, cold: {l2_hits}.",
        f"**Persistent blocks raise the utilisation: {_verdict(after.W > before.W)} by W, "
        f"{_verdict(after.U > before.U)} by U.** A block lives {lives}. From the baseline's to `persistent`'s forward W goes "
        f"from {before.W:.1f} to {after.W:.1f} % of {peak}, U from {before.U:.1f} to {after.U:.1f} % of it, and the bytes from "
        f"{base.dram_bytes / 1e6:,.0f} to {last.dram_bytes / 1e6:,.0f} MB.",
        _vector(last),
    ]


def units_in_use(call: Call) -> dict[str, float]:
    """How busy each unit is that ncu counted, in per cent."""
    return {name: call.row[key] for name, key in _UNITS.items() if key in call.row}


def _vector(call: Call) -> str:
    """Whether the vector units bind: every vector instruction takes an issue slot."""
    use = units_in_use(call)
    claim = "**After that, vector compute binds"
    if _ISSUE not in use:
        return f"{claim}: {NOT_YET}.**"
    busy = ", ".join(f"{name} {use[name]:.0f} %" for name in sorted(use, key=use.get, reverse=True))
    bound = [name for name, value in use.items() if value > BUSY]
    holds = _ISSUE in bound
    why = (f"Above {BUSY} %, near the limit: {', '.join(bound)}" if bound else
           f"No unit is near its limit, for which we take {BUSY} %, so none binds alone")
    return (f"{claim}: {'' if holds else 'not '}confirmed.** How busy the units of `persistent`'s forward are, by ncu: {busy}. "
            f"{why}{'; vector instructions go through issue slots' if holds else ''}. {_share(call)}")


def _share(call: Call) -> str:
    """Vector FLOPs over what the data sheet's rate allows in the kernels' time under ncu."""
    counted = [count_vector_flops(kernel) for kernel in call.kernels]
    gpu = find(call.row["gpu"])
    if None in counted or gpu is None:
        return f"Vector FLOPs as a share of the FP32 peak: {NOT_YET}."
    tflops = sum(counted) / sum(kernel["ncu_us"] for kernel in call.kernels) / 1e6
    return (f"Its {sum(counted) / 1e9:.1f} G vector FLOPs are {100 * tflops / gpu.fp32_tflops.value:.1f} % of what the data "
            "sheet's FP32 rate allows in the kernels' time.")


def _verdict(holds: bool) -> str:
    return "confirmed" if holds else "refuted"


def _other_commits(calls: list[Call]) -> str:
    late = [f"{call.row['variant']} {call.row['mode']}" for call in calls if call.timed and not call.same_commit]
    without = "" if all(COPY in call.peaks for call in calls) else "Where no row has a call's time, G and the copy are missing."
    return (f"Times of {', '.join(late)} are of another commit than the counters. " if late else "") + without


def _other_runs(calls: list[Call]) -> str:
    """Rows had ncu's times of its run over cold caches at first, beside bytes and per cent of that over warm ones.

    What 100 % is, by bytes, time and per cent, is then not the same for all kernels of a call.
    """
    apart = []
    for call in calls:
        peaks = [100 * definitions.gbps(kernel["dram_bytes"], kernel["ncu_us"]) / kernel["dram_pct"] for kernel in call.kernels
                 if kernel["dram_pct"] > _COARSE]
        if peaks and max(peaks) > (1 + _ROUNDING) * min(peaks):
            apart.append(f"{call.row['variant']} {call.row['mode']}")
    return (f"Of {', '.join(apart)} ncu's times are not those of the run that read the bytes (rows before 37147ca): U and W "
            "are off by as much as the data sheet's and ncu's differ." if apart else "")
