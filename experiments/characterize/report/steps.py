"""Figure 1: what a training step of each workload spends its time on, from rows of the bench `characterize`."""

from __future__ import annotations

from pathlib import Path

from ... import record
from .. import operators
from ..scopes import BACKWARD, FORWARD, OPTIMIZER
from . import draw
from .parts import NOT_YET, Figure, Section, Table, keep_last_runs, name_run, to_cell

# What a bar is made of: few enough that each has a colour of its own.
BARS = {"GEMM": ("gemm",), "SSM": ("ssm",), "convolution": ("conv1d", "conv"), "attention": ("attention",),
         "norm, elementwise, reduce": ("norm", "elementwise", "reduce"),
         "other kernels": ("embedding", "loss", "optimizer", "memcpy", "other"), "idle": ("idle",)}
_ORDER = ("idle", *operators.CLASSES)
_VARIANTS = ("mamba_ssm", "baseline", "fused", "persistent")  # others after them
_PHASES = (FORWARD, BACKWARD, OPTIMIZER)
WAITS = 25  # per cent of a step that is idle, from which on a workload is said to wait for its host


def latest(out: Path) -> dict[str, dict[str, float]]:
    """{`name_run`: {class: per cent of kernels' time and idle time}}, of `keep_last_runs`, workload by workload."""
    return _shares(_runs(out))


def section(out: Path) -> Section:
    """Figure 1 and its table."""
    title = "What a training step spends its time on"
    runs = _runs(out)
    shares = _shares(runs)
    if not shares:
        return Section(title, (f"Figure 1 of the paper, GEMM, SSM, convolution and the rest as shares of a step: {NOT_YET}. "
                               "`make characterize` on a GPU writes the rows.",))
    kinds = [kind for kind in _ORDER if any(values[kind] >= 0.05 for values in shares.values())]
    data = [{"run": name, **{kind: round(values[kind], 3) for kind in kinds}} for name, values in shares.items()]
    series = {bar: [sum(values[kind] for kind in of_bar) for values in shares.values()] for bar, of_bar in BARS.items()}
    series = {bar: values for bar, values in series.items() if max(values) >= 0.05}
    labels = [_label(rows[0]) for rows in runs.values()]
    svg = draw.chart(lambda ax: draw.stacked(ax, labels, series, pale="idle"), 1.0 + 0.17 * (draw.place_lines(labels)[-1] + 2),
                     xlabel="per cent of the step", xlim=(0, 100))
    most = max(shares, key=lambda name: shares[name]["gemm"])
    see = (f"Matrix products take at most {shares[most]['gemm']:.0f} % of a step ({most}), SSM kernels at most "
           f"{max(values['ssm'] for values in shares.values()):.0f} %; at most "
           f"{max(values['other'] for values in shares.values()):.1f} % is of no known class.")
    table = Table(("run", *kinds), [(name, *(to_cell(values[kind], 1) for kind in kinds)) for name, values in shares.items()])
    return Section(title, (Figure("operators", svg, see, data), _idle(shares) + _without_upstream(runs), table, *_phases(runs)))


def _runs(out: Path) -> dict[str, list[dict]]:
    runs = keep_last_runs(record.read(out, bench="characterize"))
    return dict(sorted(runs.items(), key=lambda run: (_place(run[1][0]), run[0])))


def _shares(runs: dict[str, list[dict]]) -> dict[str, dict[str, float]]:
    return {name: {kind: _percent(rows, operator=kind) for kind in _ORDER} for name, rows in runs.items()}


def _percent(rows: list[dict], **keys: str) -> float:
    """What the rows that have these values take of the step."""
    return 100 * sum(row["share"] for row in rows if all(row[key] == value for key, value in keys.items()))


def _phases(runs: dict[str, list[dict]]) -> tuple[str, Table]:
    """A step by its phases, and what SSM kernels take of the two that have any."""
    rows = []
    for name, run in runs.items():
        kernels = [row for row in run if row["operator"] != "idle"]
        whole = {phase: _percent(kernels, phase=phase) for phase in _PHASES}
        rest = _percent([row for row in kernels if row["phase"] not in _PHASES])
        ssm = [100 * _percent(kernels, phase=phase, operator="ssm") / whole[phase] if whole[phase] else None
               for phase in (FORWARD, BACKWARD)]
        rows.append((name, *(to_cell(value, 1) for value in (*whole.values(), _percent(run, operator="idle"), rest, *ssm))))
    return ("The same steps by phase, in per cent of the step; the rest is kernels between phases, as those that clip the "
            "gradient. Last, what SSM kernels take of the kernels' time in the forward and in the backward, in per cent.",
            Table(("run", *_PHASES, "idle", "rest", "SSM of forward", "SSM of backward"), rows))


def _place(row: dict) -> tuple:
    """Where a row's run comes in the order."""
    variant = row["variant"]
    return (row["workload"], row["preset"], row["mixer"],
            _VARIANTS.index(variant) if variant in _VARIANTS else len(_VARIANTS))


def _label(row: dict) -> tuple[str, str]:
    """A bar's title, which the variants of a workload share, and its name."""
    title, _, how = name_run(row).partition(f" {row['variant']}, ")
    return f"{title}, {how}", row["variant"]


def _idle(shares: dict[str, dict[str, float]]) -> str:
    """Which workloads keep the GPU waiting, and for how much of a step."""
    by_workload: dict[str, list[float]] = {}
    for name, values in shares.items():
        by_workload.setdefault(name.partition(" ")[0], []).append(values["idle"])
    waits = {workload: found for workload, found in by_workload.items() if max(found) > WAITS}
    others = [value for workload, found in by_workload.items() if workload not in waits for value in found]
    rest = f"the GPU is idle for at most {max(others):.0f} % of a step" if others else ""
    if not waits:
        return f"In all of these runs {rest}."
    said = " and ".join(f"{_span(found)} % of a step of {workload}" for workload, found in waits.items())
    return (f"The GPU is idle for {said}: there the host binds, which launches kernels more slowly than they run. Shares are "
            f"of the whole step, so all kernels' are small there.{f' In other workloads {rest}.' if rest else ''}")


def _without_upstream(runs: dict[str, list[dict]]) -> str:
    """What of workloads mamba_ssm was not profiled inside, said if it was inside others."""
    variants: dict[str, set[str]] = {}
    for rows in runs.values():
        variants.setdefault(rows[0]["workload"], set()).update(row["variant"] for row in rows)
    without = [workload for workload, found in variants.items() if "mamba_ssm" not in found]
    said = f" With mamba_ssm inside, steps of {' and '.join(without)} were not profiled."
    return said if 0 < len(without) < len(variants) else ""


def _span(values: list[float]) -> str:
    ends = dict.fromkeys((f"{min(values):.0f}", f"{max(values):.0f}"))
    return " to ".join(ends)
