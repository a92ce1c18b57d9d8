"""How much of the memory's bandwidth the kernels use, how long their blocks live, and what becomes of the paper's advice."""

from __future__ import annotations

from .. import definitions
from ..definitions import COPY, DATASHEET, NCU, Call
from . import draw, kernels
from .parts import NOT_YET, Figure, Section, Table, number

PAPER_PERCENT = 57.5
_BUSY = 80  # per cent; no unit is kept busier by a kernel that also waits for others
_UNITS = {"DRAM": "dram_pct", "tensor cores": "tensor_pct", "issue slots": "issue_pct", "shared memory": "shared_pct"}


def section(calls: list[Call]) -> Section:
    """Utilisation by three definitions against three peaks, and the claims."""
    title = "Bandwidth, and how long blocks live"
    if not calls:
        return Section(title, (f"Utilisation, block lifetime and occupancy: {NOT_YET}.",))
    lines = []
    for call in calls:
        for peak, found in definitions.utilisations(call).items():
            lines.append({"variant": call.row["variant"], "mode": call.row["mode"], "peak": peak, **found._asdict()})
    shown = [line for line in lines if line["peak"] == DATASHEET] or [line for line in lines if line["peak"] == NCU]
    labels = [f"{line['variant']}, {line['mode']}" for line in shown]

    def plot(ax) -> None:
        draw.bars(ax, labels, {name: [line[name] for line in shown] for name in "UWG"})
        ax.axvline(PAPER_PERCENT, color=draw.MUTED, linewidth=1, linestyle="--", label=f"{PAPER_PERCENT} %, the paper's")

    svg = draw.chart(plot, 1.0 + 0.5 * len(shown), xlabel=f"per cent of the peak: {shown[0]['peak']}", xlim=(0, 80))
    apart = max(shown, key=lambda line: abs(line["U"] - line["W"]))
    points = abs(apart["U"] - apart["W"])
    see = (f"U and W of one call are up to {points:.0f} points apart ({apart['variant']}, {apart['mode']}), so it matters "
           f"which the paper's {PAPER_PERCENT} % is. Nor is more always better: see the bytes below.")
    note = ("U: mean over kernels; W: weighted with time; G: DRAM bytes over the peak times the call's own time, launches and "
            "gaps included. " + _other_commits(calls))
    cells = [(line["variant"], line["mode"], line["peak"], *(number(line[name], 1) for name in "UWG")) for line in lines]
    return Section(title, (note.strip(), Figure("utilisation", svg, see, lines),
                           Table(("variant", "mode", "peak", "U %", "W %", "G %"), cells, 3), _work(calls),
                           *claims(calls), kernels.registers(calls)))


def _work(calls: list[Call]) -> Table:
    rows = []
    for call in calls:
        wall, row = call.wall_us, call.row
        rows.append((
            row["variant"], row["mode"], number(wall), number(row["launches"]), number(call.dram_bytes / 1e6),
            number(definitions.amplification(call), 2),
            number(wall and definitions.gbps(call.ideal.bytes, wall)), number(wall and definitions.gbps(call.dram_bytes, wall)),
            number(wall and 100 * definitions.speed_of_light(call), 1), number(row.get("blocks")),
            number(row.get("block_cycles")), number(row.get("occupancy_pct"), 1), number(row.get("l2_hit_pct"), 1)))
    return Table(("variant", "mode", "us", "launches", "DRAM MB", "times the ideal's bytes", "effective GB/s", "measured GB/s",
                  "of the floor %", "blocks", "block cycles", "occupancy %", "L2 hits %"), rows, 2)


def claims(calls: list[Call]) -> list[str]:
    """The paper's three, each confirmed or refuted by the forwards' counters."""
    by_name = {call.row["variant"]: call for call in calls if call.row["mode"] == "fwd"}
    if not {"baseline", "fused", "persistent"} <= by_name.keys():
        return [f"The paper's claims on fusion and persistent blocks: {NOT_YET}."]
    base, fused, last = (by_name[name] for name in ("baseline", "fused", "persistent"))
    before, after = (definitions.utilisations(call)[NCU] for call in (base, last))
    use = {name: last.row[key] for name, key in _UNITS.items() if key in last.row}
    counted = [definitions.vector_flops(kernel) for kernel in last.kernels]
    arithmetic = None if None in counted else sum(counted)
    lived = [call.row.get("block_cycles") for call in (base, last)]
    lives = f"{lived[1] / lived[0]:.0f} times as long" if all(lived) else f"how much longer: {NOT_YET}"
    hits = [call.row.get("l2_hit_pct") for call in (base, fused)]
    through_l2 = NOT_YET if None in hits else f"from {hits[0]:.0f} to {hits[1]:.0f} %"
    return [
        f"**Fusion saves the round trip through L2: {_verdict(fused.dram_bytes < base.dram_bytes)}.** `fused` moves "
        f"{fused.dram_bytes / 1e6:,.0f} MB through DRAM where the baseline moves {base.dram_bytes / 1e6:,.0f}; L2 hits: "
        f"{through_l2}.",
        f"**Persistent blocks raise the utilisation: {_verdict(after.W > before.W)} by W, "
        f"{_verdict(after.U > before.U)} by U.** A block lives {lives}; W goes from {before.W:.1f} to "
        f"{after.W:.1f} %, U from {before.U:.1f} to {after.U:.1f} %, and {last.dram_bytes / 1e6:,.0f} MB are moved in all.",
        f"**After that, vector compute binds: {'' if use.get('issue slots', 0) > _BUSY else 'not '}confirmed.** Of the "
        f"persistent forward's units none but what is above {_BUSY} % would bind alone: "
        + ", ".join(f"{name} {value:.0f} %" for name, value in use.items()) + ". How much of the issue slots is arithmetic: "
        + (f"{NOT_YET}." if arithmetic is None else f"{arithmetic / 1e9:.1f} G vector FLOPs."),
    ]


def _verdict(holds: bool) -> str:
    return "confirmed" if holds else "refuted"


def _other_commits(calls: list[Call]) -> str:
    late = [f"{call.row['variant']} {call.row['mode']}" for call in calls if call.timed and not call.same_commit]
    without = "" if all(COPY in call.peaks for call in calls) else "Where no row has a call's time, G and the copy are missing."
    return (f"Times of {', '.join(late)} are of another commit than the counters. " if late else "") + without
