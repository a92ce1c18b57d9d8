"""Figure 1: what a training step of each workload spends its time on, from rows of the bench `characterize`."""

from __future__ import annotations

from pathlib import Path

from ... import record
from .. import operators
from . import draw
from .parts import NOT_YET, Figure, Section, Table, last_runs, number

# Side by side in a bar; what is small shares a colour.
_SHADES = {"gemm": 0, "ssm": 1, "conv": 2, "conv1d": 2, "attention": 3, "norm": 4, "elementwise": 4, "reduce": 4}
_ORDER = (*operators.CLASSES, "idle")


def latest(out: Path) -> dict[str, dict[str, float]]:
    """{`run_name`: {class: per cent of kernels' time and idle time}}, of `last_runs`."""
    return {name: {kind: 100 * sum(row["share"] for row in rows if row["operator"] == kind) for kind in _ORDER}
            for name, rows in last_runs(record.read(out, bench="characterize")).items()}


def section(out: Path) -> Section:
    """Figure 1 and its table."""
    title = "What a training step spends its time on"
    shares = latest(out)
    if not shares:
        return Section(title, (f"Figure 1 of the paper, GEMM, SSM, convolution and the rest as shares of a step: {NOT_YET}. "
                               "`make characterize` on a GPU writes the rows.",))
    kinds = [kind for kind in _ORDER if any(values[kind] >= 0.05 for values in shares.values())]
    data = [{"run": name, **{kind: round(values[kind], 3) for kind in kinds}} for name, values in shares.items()]
    colours = {kind: draw.SERIES[_SHADES.get(kind, 5)] for kind in kinds}
    series = {kind: [values[kind] for values in shares.values()] for kind in kinds}
    svg = draw.chart(lambda ax: draw.stacked(ax, list(shares), series, colours), 1.2 + 0.4 * len(shares),
                     xlabel="per cent of the step", xlim=(0, 100))
    most = max(shares, key=lambda name: shares[name]["gemm"])
    see = (f"Matrix products take at most {shares[most]['gemm']:.0f} % of a step ({most}), SSM kernels at most "
           f"{max(values['ssm'] for values in shares.values()):.0f} %, and no rule knows "
           f"{max(values['other'] for values in shares.values()):.1f} % at most.")
    table = Table(("run", *kinds), [(name, *(number(values[kind], 1) for kind in kinds)) for name, values in shares.items()])
    return Section(title, (Figure("operators", svg, see, data), table))
